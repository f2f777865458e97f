"""A step of training: loss, gradients and optimiser in captured programs.

Protocol: `Step(objective, optimizer, accumulation)` runs `step(batches, count)`: the micro-batches, each with
the gradient of its summed loss over `count`, what is counted in all of them (on all ranks), and then the
optimiser. The sums are the same, up to their order, however a batch is cut into micro-batches. One
micro-batch is one program; several are one that adds gradients up in float32, and one that takes the step.

An objective (objectives.py) gives sums over a batch: the loss first, and then what is logged beside it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context

from tinygrad_nv.train.data import Batch
from tinygrad_nv.train.objectives import Objective
from tinygrad_nv.train.optimizers import GradientSums, Optimizer


@dataclass(frozen=True)
class StepResult:
    """Means over what is counted: `loss` in nats, and others by name; the norm of gradients before they were
    clipped; whether the step was skipped because that was not finite."""
    loss: float
    means: dict[str, float]
    grad_norm: float
    skipped: bool


class Step:
    """The steps of a run. `accumulation`: micro-batches of a step. `reduce`: gradients of this rank to those
    of all (dist/train/data_parallel.py), in the captured program."""

    def __init__(self, objective: Objective, optimizer: Optimizer, accumulation: int = 1,
                 reduce: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None) -> None:
        self.objective, self.optimizer, self.accumulation = objective, optimizer, accumulation
        self.inputs, self.reduce = objective.inputs, reduce
        self.sums = GradientSums(optimizer.parameters) if accumulation > 1 else None
        self.done, self._skipped = 0, self.skipped
        self._whole, self._part, self._end = TinyJit(self._run), TinyJit(self._add), TinyJit(self._take)
        self._evaluate = TinyJit(self._summed)

    def __call__(self, batches: Sequence[Batch], count: int) -> StepResult:
        """Takes a step on micro-batches, of which `count` are counted in all, on all ranks."""
        found = np.zeros(1 + len(self.objective.names))
        with Context(TRAINING=1):
            for number, batch in enumerate(batches):
                self.objective.fill(batch, max(count, 1), self.done * len(batches) + number)
                found += (self._whole if self.sums is None else self._part)().numpy()
            if self.sums is not None: self._end()
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

    # **** captured ****

    def _derived(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's sums, and the gradients of its part of the mean loss."""
        sums, own = self.objective.sums(), self.optimizer.parameters
        loss = sums[0] / self.inputs.count.reshape(())
        return Tensor.stack(*sums), dict(zip(own, loss.gradient(*own.values()), strict=True))

    def _reduced(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients if self.reduce is None else self.reduce(gradients)

    def _run(self) -> Tensor:
        sums, gradients = self._derived()
        return sums.realize(*self.optimizer.schedule_step(self._reduced(gradients)))

    def _add(self) -> Tensor:
        assert self.sums is not None
        sums, gradients = self._derived()
        for name, parameter in self.optimizer.parameters.items(): parameter.grad = gradients[name]
        return sums.realize(*self.sums.schedule_add())

    def _take(self) -> None:
        assert self.sums is not None
        changed = self.optimizer.schedule_step(self._reduced(self.sums.gradients))
        Tensor.realize(*changed, *self.sums.schedule_zero())

    def _summed(self) -> Tensor: return Tensor.stack(*self.objective.sums()).realize()
