"""A step of training: loss, gradients and optimiser in captured programs.

Protocol: `Step(objective, optimizer, accumulation)` runs `step(batches, count)`: the micro-batches, each with
the gradient of its summed loss over `count`, what is counted in all of them on all ranks, and then the
optimiser. `parts` (replicas.py) make gradients of all ranks of this rank's. The sums are the same, up to
their order, however a batch is cut into micro-batches. One micro-batch of one rank is one program; several
are one that adds gradients up in float32, and one that takes the step. Between these several ranks run a
third, which puts the sums of all ranks in place of this rank's: the other two are those of one rank. So N
ranks with one micro-batch each, and one rank with N, have the same weights to the bit, where `parts` are
`Replicas`.

An objective (objectives.py) gives sums over a batch: the loss first, and then what is logged beside it.

`first_bad` names the layer that made a NaN of a step.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context

from tinygrad_nv.functional import FP8_KINDS
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import slots
from tinygrad_nv.numerics.fp8 import COUNTERS, Fp8State, name_counters
from tinygrad_nv.numerics.verify.scan import finite
from tinygrad_nv.train.data import Batch
from tinygrad_nv.train.objectives import Inputs, Objective
from tinygrad_nv.train.optimizers import GradientSums, Optimizer
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.ranks import OneRank

LOSS = "the loss"


@dataclass(frozen=True)
class StepResult:
    """Means over what is counted: `loss` in nats, and others by name; the norm of gradients before they were
    clipped; whether the step was skipped because that was not finite; and what its precision did: the scale
    that its loss had (`loss_scale`), values that FP8 clamped (`fp8_clamped_activation` …) or flushed to 0."""
    loss: float
    means: dict[str, float]
    grad_norm: float
    skipped: bool
    precision: dict[str, float]


def capture(program: Callable[[], Any]) -> Any:
    """A TinyJit that captures at the first call. By itself it would run the program without a plan of its
    memory first, which took 1.3 times the bytes of a captured step where this was measured."""
    made = TinyJit(program)
    made.cnt = 1
    return made


class Step:
    """The steps of a run. `accumulation`: micro-batches of a step of this rank. `parts` and `ranks` are for
    several ranks; the optimiser is then that of `parts.optimized`. `fp8`: of a model with layers in FP8."""

    def __init__(self, objective: Objective, optimizer: Optimizer, accumulation: int = 1,
                 parts: Parts | None = None, ranks: OneRank | None = None,
                 fp8: Fp8State | None = None) -> None:
        self.objective, self.optimizer, self.accumulation = objective, optimizer, accumulation
        self.inputs, self.parts, self.ranks, self.fp8 = objective.inputs, parts, ranks, fp8
        self.parameters = optimizer.parameters if parts is None else parts.whole
        self._added = optimizer.parameters if parts is None else parts.added
        joins = parts is not None and parts.joins
        several = joins or accumulation > 1 or (ranks is not None and ranks.layout.size > ranks.layout.tensor)
        self.sums = GradientSums(self._added) if several else None
        self._joins = joins
        self._taken: Named = {}     # what the optimiser takes
        if self.sums is not None: self._taken = self.sums.gradients if parts is None else \
            parts.take(self.sums.gradients)
        self.done, self._skipped = 0, -1    # before the first step it is not read: a run may go on
        self._whole, self._part, self._end = capture(self._run), capture(self._add), capture(self._take)
        self._joined = capture(self._join)
        self._evaluate = capture(self._sum)

    @property
    def programs(self) -> tuple[Callable[[], object], ...]:
        """Programs of a step, in order, uncaptured: the first for each micro-batch."""
        if self.sums is None: return self._run,
        return (self._add, self._join, self._take) if self._joins else (self._add, self._take)

    @property
    def between(self) -> list[Tensor]:
        """Gradients that stay between the programs of a step."""
        return [] if self.sums is None else [*self.sums.gradients.values(), *self._taken.values()]

    @property
    def evaluation(self) -> Callable[[], object]:
        """Program of an evaluation, uncaptured, which runs for each batch."""
        return self._sum

    def __call__(self, batches: Sequence[Batch], count: int) -> StepResult:
        """Takes a step on this rank's micro-batches. `count` is what is counted on all ranks."""
        precision = self._precision()
        if self._skipped < 0: self._skipped = self.skip_count
        with Context(TRAINING=1):
            found = self._pass_on(batches, max(count, 1))
            if self.sums is not None:
                if self._joins: self._joined()
                self._end()
        counts = np.zeros(0) if self.fp8 is None else self.fp8.last.numpy().astype(np.float64).reshape(-1)
        if self.ranks is not None:
            both = self.ranks.sum_losses(np.append(found, counts))
            found, counts = both[:len(found)], both[len(found):]
        if self.fp8 is not None: precision |= name_counters(counts.reshape(len(COUNTERS), len(FP8_KINDS)))
        self.done += 1
        loss, *rest = (float(each) for each in found / max(count, 1))
        before, self._skipped = self._skipped, self.skip_count
        return StepResult(loss, dict(zip(self.objective.names, rest, strict=True)),
                          float(self.optimizer.grad_norm.item()), self._skipped > before, precision)

    def _pass_on(self, batches: Sequence[Batch], count: int) -> np.ndarray:
        """The sums of all micro-batches, whose gradients are added up, or taken by the one program."""
        found = np.zeros(1 + len(self.objective.names))
        for number, batch in enumerate(batches):
            self.objective.fill(batch, count, self._number(number))
            found += (self._whole if self.sums is None else self._part)().numpy()
        return found

    def evaluate(self, batch: Batch) -> np.ndarray:
        """The sums of a batch, with the weights as they are: loss first, float64."""
        self.objective.fill(batch, 1, 0)
        with Context(TRAINING=0): return self._evaluate().numpy().astype(np.float64)

    def first_bad(self, documents: bool) -> str:
        """The first layer with a value that is not finite, of the batch in the buffers; `documents`: rows
        have several."""
        with self._present(): return first_bad(self.objective.model, self.inputs, documents)

    @property
    def skip_count(self) -> int:
        """Steps that changed nothing, so far."""
        return int(self.optimizer.skipped.item())

    def _precision(self) -> dict[str, float]:
        """The scale of the loss of the step that begins."""
        scaler = self.optimizer.loss_scaler
        return {} if scaler is None else {"loss_scale": float(scaler.scale.item())}

    def _number(self, micro: int) -> int:
        """Returns the number of a micro-batch of this step in the run, over all data coordinates, which
        follow each other."""
        if self.ranks is None: return self.done * self.accumulation + micro
        place, layout = self.ranks.place, self.ranks.layout
        micro = (self.done * self.accumulation + micro) * layout.data + place.data
        return micro * layout.context + place.context   # other tokens, for which dropout is drawn apart

    # **** captured ****

    def _derive(self) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """A micro-batch's sums, the gradients of its part of the mean loss, times the loss's scale where it
        has one, and what else is to be realized."""
        with self._present(): sums = self.objective.sums()
        own = self.parameters if self.parts is None else self.parts.leaves()
        loss, scaler, fp8 = sums[0] / self.inputs.count.reshape(()), self.optimizer.loss_scaler, self.fp8
        if scaler is not None: loss = loss * scaler.scale.detach().reshape(())
        meters = [] if fp8 is None else fp8.meters
        found = loss.gradient(*own.values(), *meters)
        gradients = dict(zip(own, found, strict=False))
        seen = [] if fp8 is None else fp8.schedule_seen(found[len(own):])
        return Tensor.stack(*sums), self.each(gradients), seen

    def each(self, gradients: Named) -> Named:
        """Returns the gradients of a micro-batch that are added up."""
        return gradients if self.parts is None else self.parts.each(gradients)

    def _update(self, gradients: Named) -> list[Tensor]:
        """Returns the tensors to be realized of an update."""
        changed = self.optimizer.schedule_step(gradients)
        if self.fp8 is not None: changed += self.fp8.schedule_step(self.optimizer.grad_norm.isfinite())
        return changed if self.parts is None else [*changed, *self.parts.gather()]

    def _run(self) -> Tensor:
        sums, gradients, seen = self._derive()
        return sums.realize(*seen, *self._update(gradients))

    def _add(self) -> Tensor:
        sums, gradients, seen = self._derive()
        return sums.realize(*seen, *self.accumulate(gradients))

    def accumulate(self, gradients: Named) -> list[Tensor]:
        """Returns the tensors to be realized to add gradients of a micro-batch to the sums, by name."""
        assert self.sums is not None
        # in memory first: of two terms (a tied embedding has) the kernel would add one, then the other
        for name, each in gradients.items(): self._added[name].grad = each.contiguous()
        return self.sums.schedule_add(names=gradients)

    def _take(self) -> None:
        assert self.sums is not None
        Tensor.realize(*self._update(self._taken), *self.sums.schedule_zero())

    def _join(self) -> None:
        assert self.sums is not None
        assert self.parts is not None
        for name, made in self.parts.all(self.sums.gradients).items(): self._taken[name].assign(made)
        Tensor.realize(*self._taken.values())

    def _present(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.parts is None else self.parts.present()

    def _sum(self) -> Tensor:
        with self._present(): return Tensor.stack(*self.objective.sums()).realize()


def first_bad(model: Llama, inputs: Inputs, documents: bool) -> str:
    """Returns the layer that made a NaN, in words: computes the batch that is in `inputs` again with what a
    step computes, realizes each layer's output, scans it as sentinels do (numerics/verify/scan.py), and names
    the first that has a NaN or an infinity; and the first parameter of it that has one, where the weights are
    the cause."""
    with Context(TRAINING=1): return first_bad_layer(model, inputs, documents)[0]


def first_bad_layer(model: Llama, inputs: Inputs, documents: bool, x: Tensor | None = None
                    ) -> tuple[str, Tensor]:
    """The layer in words, and what the last one makes of the batch; of a stage of a pipeline the first of
    its own, which gets the hidden states x."""
    batch, stage, bad = inputs.of(model, documents), model.parallel, list[str]()
    first, ends = (0, True) if stage is None else (stage.layers.start, stage.last)

    def see(made: Tensor, layer: str, own: str = "") -> Tensor:
        made = made.realize()
        if not bad and not finite(made): bad.append(_describe(model, layer, own or layer))
        return made
    if x is None: x = see(model.embed(inputs.tokens), "model.embed_tokens")
    for i, block in enumerate(model.blocks):
        x = see(block(x, batch, None), f"model.layers.{first + i}", f"model.layers.{i}")
    if ends: see(model.logits(see(model.normalise_last(x), "model.norm")), "lm_head")
    return (bad or [LOSS])[0], x


def _describe(model: Llama, layer: str, own: str) -> str:
    """A layer, which is `own` in this network."""
    for name, slot in slots(model).items():
        if name.startswith(own + ".") and not finite(slot.tensor):
            return f"{layer}, whose {layer}{name.removeprefix(own)} has one"
    return layer
