"""Pipeline parallel training: each rank of a pipeline has a stage, some layers, and all micro-batches pass
through the stages in the order of a schedule.

Protocol (sources in dist/train/schedules.py). The first stage embeds, the last has the norm, the head and the
loss. `PipelineStep` is a `Step` whose micro-batches run as passes of `Pipeline` (dist/train/pipeline.py):

    F   hidden states of this stage, sent on. The last stage computes nothing yet
    B   the stage again, with the gradients of its input, which is sent back, and of its parameters, which are
        added up; of the last stage's loss. Where the schedule splits passes, the input's alone
    W   the stage again, with the gradients of its parameters

Between F and B a stage keeps its input alone, as activation checkpointing of a whole stage does: memory does
not grow with its layers, and a step computes 4/3 of what one rank does, 5/3 where passes are split. Every
pass is one captured program. Sums of gradients, the join over ranks and the update are those of `Step`.

Only the last stage has sums of the loss; the others give zeros, and the sums over ranks are all there is.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor
from tinygrad.helpers import Context

from tinygrad_nv.dist.collectives.functions import recv, send
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train import schedules
from tinygrad_nv.dist.train.pipeline import Pipeline
from tinygrad_nv.dist.train.schedules import Schedule
from tinygrad_nv.train.data import Batch
from tinygrad_nv.train.objectives import Supervised, cross_entropy
from tinygrad_nv.train.optimizers import Optimizer
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.ranks import OneRank
from tinygrad_nv.train.step import Step, captured

if TYPE_CHECKING:
    from tinygrad_nv.train.arguments import TrainingArguments

# by the names of --pipeline-schedule: of ranks and micro-batches
SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "1f1b": schedules.one_f_one_b, "gpipe": schedules.gpipe, "zero-bubble": schedules.zero_bubble_h1}


def schedule(arguments: TrainingArguments) -> Schedule:
    """The one that the arguments name."""
    made = SCHEDULES[arguments.pipeline_schedule or "1f1b"]
    return made(arguments.pipeline_parallel_size, arguments.gradient_accumulation_steps)


class StageObjective(Supervised):
    """The loss of a pipeline, of which this process has a stage."""

    def passed(self, x: Tensor | None) -> Tensor:
        """Hidden states (rows, width, hidden) that this stage makes of those of the stage before, or of the
        batch."""
        batch = self.inputs.of(self.model, self.options.documents)
        return self.model.passed(self.model.embedded(self.inputs.tokens) if x is None else x, batch)

    def loss(self, x: Tensor) -> Tensor:
        """The sum over the batch, of the last stage's input."""
        hidden = self.model.norm(self.passed(x))
        return cross_entropy(self.model, hidden, self.inputs, self.options, "sum")


class PipelineStep(Step):
    """A `Step` of one stage, that of this rank in the group `pipe`, as the `Stage` of a `Pipeline`."""

    def __init__(self, objective: StageObjective, optimizer: Optimizer, order: Schedule, pipe: Group,
                 parts: Parts, ranks: OneRank) -> None:
        super().__init__(objective, optimizer, order.microbatches, parts, ranks)
        self.stage, model, tokens = objective, objective.model, self.inputs.tokens
        self.pipe, self.first, self.last = pipe, pipe.rank == 0, pipe.rank == pipe.size - 1
        self.shape, self.dtype = (*(int(n) for n in tokens.shape), model.config.hidden_size), model.dtype
        self.pipeline = Pipeline(order, pipe, {pipe.rank: self}, self.shape, self.dtype, model.device)
        self._batches: Sequence[Batch] = ()
        self._count, self._found = 1, np.zeros(0)
        self._given, self._gradients = dict[int, Tensor | None](), dict[int, Tensor | None]()
        self._forward, self._evaluated = captured(self._made), captured(self._scored)
        self._back = captured(self._both if not order.splits else self._input_alone)
        self._behind = captured(self._parameters_alone)

    def _passed(self, batches: Sequence[Batch], count: int) -> np.ndarray:
        self._batches, self._count, self._found = batches, count, np.zeros(1 + len(self.objective.names))
        self.pipeline.run()
        return self._found

    # **** passes of a `Pipeline` ****

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Hidden states for the next stage; of the last nothing, whose loss comes with its gradient."""
        self._given[microbatch] = x
        if self.last: return None
        self._fill(microbatch)
        return self._forward(*_some(x))

    def backward(self, microbatch: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        """The gradient of the stage's input; `weights`: with those of parameters."""
        x = self._given[microbatch]
        self._fill(microbatch)
        if weights: del self._given[microbatch]
        else: self._gradients[microbatch] = grad
        if not weights and self.first: return None      # it has no input
        dx, sums = self._back(*_some(x, grad))
        if sums is not None: self._found += sums.numpy()
        return dx

    def weights(self, microbatch: int) -> None:
        """Adds up gradients of parameters."""
        self._fill(microbatch)
        self._behind(*_some(self._given.pop(microbatch), self._gradients.pop(microbatch)))

    def _fill(self, microbatch: int) -> None:
        self.objective.fill(self._batches[microbatch], self._count, self._number(microbatch))

    # **** captured ****

    def _made(self, *x: Tensor) -> Tensor:
        return self.stage.passed(*(x or (None,))).contiguous().realize()

    def _both(self, *given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dx, sums, gradients = self._derived_of(given, True, True)
        Tensor.realize(*_some(dx, sums), *self._added_up(gradients))
        return dx, sums

    def _input_alone(self, *given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dx, sums, _ = self._derived_of(given, True, False)
        Tensor.realize(*_some(dx, sums))
        return dx, sums

    def _parameters_alone(self, *given: Tensor) -> None:
        Tensor.realize(*self._added_up(self._derived_of(given, False, True)[2]))

    def _derived_of(self, given: Sequence[Tensor], inputs: bool, parameters: bool
                    ) -> tuple[Tensor | None, Tensor | None, Named]:
        """The gradient of this stage's input, the sums of its loss, and the gradients of its parameters, of
        what there is and is asked for. `given`: the input, but of the first stage, and the gradient of its
        result, but of the last."""
        assert self.parts is not None
        x = None if self.first else given[0]
        own, scaler = self.parts.leaves() if parameters else Named(), self.optimizer.loss_scaler
        if self.last:
            assert x is not None
            loss, grad = self.stage.loss(x), None
            sums, made = loss.reshape(1).contiguous(), loss / self.inputs.count.reshape(())
            if scaler is not None: made = made * scaler.scale.detach().reshape(())
        else: sums, made, grad = None, self.stage.passed(x), given[-1]
        wanted = [*own.values(), *(_some(x) if inputs else ())]
        found = made.gradient(*wanted, gradient=grad)
        gradients = self.parts.each(dict(zip(own, found, strict=False))) if parameters else Named()
        return found[-1].contiguous() if inputs and x is not None else None, sums, gradients

    # **** evaluation ****

    def evaluate(self, batch: Batch) -> np.ndarray:
        """The sums of a batch on the last stage, zeros on others."""
        self.objective.fill(batch, 1, 0)
        x, zeros = None, np.zeros(1 + len(self.objective.names))
        if not self.first:
            x = recv(self.shape, self.dtype, self.pipe, self.pipe.rank - 1, "evaluation", self.stage.model.device)
            x = x.realize()
        with Context(TRAINING=0): made = self._evaluated(*_some(x))
        if self.last: return made.numpy().astype(np.float64)
        send(made, self.pipe, self.pipe.rank + 1, "evaluation").realize()
        return zeros

    def _scored(self, *x: Tensor) -> Tensor:
        if self.last: return self.stage.loss(*x).reshape(1).contiguous().realize()
        return self._made(*x)


def _some(*given: Tensor | None) -> list[Tensor]: return [each for each in given if each is not None]
