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
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context

from tinygrad_nv.train.data import Batch
from tinygrad_nv.train.objectives import Objective
from tinygrad_nv.train.optimizers import GradientSums, Optimizer
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.ranks import OneRank


@dataclass(frozen=True)
class StepResult:
    """Means over what is counted: `loss` in nats, and others by name; the norm of gradients before they were
    clipped; whether the step was skipped because that was not finite."""
    loss: float
    means: dict[str, float]
    grad_norm: float
    skipped: bool


class Step:
    """The steps of a run. `accumulation`: micro-batches of a step of this rank. `parts` and `ranks` are for
    several ranks; the optimiser is then that of `parts.optimized`."""

    def __init__(self, objective: Objective, optimizer: Optimizer, accumulation: int = 1,
                 parts: Parts | None = None, ranks: OneRank | None = None) -> None:
        self.objective, self.optimizer, self.accumulation = objective, optimizer, accumulation
        self.inputs, self.parts, self.ranks = objective.inputs, parts, ranks
        self.parameters = optimizer.parameters if parts is None else parts.whole
        self._added = optimizer.parameters if parts is None else parts.added
        joins = parts is not None and parts.joins
        several = joins or accumulation > 1 or (ranks is not None and ranks.size > 1)
        self.sums = GradientSums(self._added) if several else None
        self._joins = joins
        self._taken: Named = {}     # what the optimiser takes
        if self.sums is not None: self._taken = self.sums.gradients if parts is None else \
            parts.taken(self.sums.gradients)
        self.done, self._skipped = 0, self.skipped
        self._whole, self._part, self._end = TinyJit(self._run), TinyJit(self._add), TinyJit(self._take)
        self._joined = TinyJit(self._join)
        self._evaluate = TinyJit(self._summed)

    def __call__(self, batches: Sequence[Batch], count: int) -> StepResult:
        """Takes a step on this rank's micro-batches. `count` is what is counted on all ranks."""
        found = np.zeros(1 + len(self.objective.names))
        with Context(TRAINING=1):
            for number, batch in enumerate(batches):
                self.objective.fill(batch, max(count, 1), self._number(number))
                found += (self._whole if self.sums is None else self._part)().numpy()
            if self.sums is not None:
                if self._joins: self._joined()
                self._end()
        if self.ranks is not None: found = self.ranks.summed(found)
        self.done += 1
        loss, *rest = (float(each) for each in found / max(count, 1))
        before, self._skipped = self._skipped, self.skipped
        return StepResult(loss, dict(zip(self.objective.names, rest, strict=True)),
                          float(self.optimizer.grad_norm.item()), self._skipped > before)

    def evaluate(self, batch: Batch) -> np.ndarray:
        """The sums of a batch, with the weights as they are: loss first, float64."""
        self.objective.fill(batch, 1, 0)
        with Context(TRAINING=0): return self._evaluate().numpy().astype(np.float64)

    @property
    def skipped(self) -> int:
        """Steps that changed nothing, so far."""
        return int(self.optimizer.skipped.item())

    def _number(self, micro: int) -> int:
        """Of a micro-batch of this step in the run, on all ranks: those of ranks follow each other."""
        rank, size = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        return (self.done * self.accumulation + micro) * size + rank

    # **** captured ****

    def _derived(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's sums, and the gradients of its part of the mean loss."""
        with self._present(): sums = self.objective.sums()
        own = self.parameters if self.parts is None else self.parts.leaves()
        loss = sums[0] / self.inputs.count.reshape(())
        gradients = dict(zip(own, loss.gradient(*own.values()), strict=True))
        return Tensor.stack(*sums), gradients if self.parts is None else self.parts.each(gradients)

    def _updated(self, gradients: Named) -> list[Tensor]:
        """What is to be realized of an update."""
        changed = self.optimizer.schedule_step(gradients)
        return changed if self.parts is None else [*changed, *self.parts.gathered()]

    def _run(self) -> Tensor:
        sums, gradients = self._derived()
        return sums.realize(*self._updated(gradients))

    def _add(self) -> Tensor:
        assert self.sums is not None
        sums, gradients = self._derived()
        # in memory first: of two terms (a tied embedding has) the kernel would add one, then the other
        for name, tensor in self._added.items(): tensor.grad = gradients[name].contiguous()
        return sums.realize(*self.sums.schedule_add())

    def _take(self) -> None:
        assert self.sums is not None
        Tensor.realize(*self._updated(self._taken), *self.sums.schedule_zero())

    def _join(self) -> None:
        assert self.sums is not None
        assert self.parts is not None
        for name, made in self.parts.all(self.sums.gradients).items(): self._taken[name].assign(made)
        Tensor.realize(*self._taken.values())

    def _present(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.parts is None else self.parts.present()

    def _summed(self) -> Tensor:
        with self._present(): return Tensor.stack(*self.objective.sums()).realize()
