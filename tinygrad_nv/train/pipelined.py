"""Pipeline parallel training: each rank of a pipeline has a stage, some layers, or several, and all
micro-batches pass through the stages in the order of a schedule.

Protocol (sources in dist/train/schedules.py). The first stage embeds, the last has the norm, the head and the
loss. `PipelineStep` is a `Step` whose micro-batches run as passes of `Pipeline` (dist/train/pipeline.py)
through this rank's `StagePasses`:

    F   hidden states of the stage, sent on. The last stage computes nothing yet
    B   the stage again, with the gradients of its input, which is sent back, and of its parameters, which are
        added up; of the last stage's loss. Where the schedule splits passes, the input's alone
    W   the stage again, with the gradients of its parameters

Between F and B a stage keeps its input alone, as activation checkpointing of a whole stage does: memory does
not grow with its layers, and a step computes 4/3 of what one rank does, 5/3 where passes are split. Every
pass is one captured program. Sums of gradients, the join over ranks and the update are those of `Step`.

Only the last stage has sums of the loss; the others give zeros, and the sums over ranks are all there is.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tinygrad import Tensor
from tinygrad.helpers import Context

from tinygrad_nv.dist.collectives.functions import recv, send
from tinygrad_nv.dist.train.pipeline import Pipeline
from tinygrad_nv.dist.train.schedules import Schedule
from tinygrad_nv.numerics.verify.scan import finite
from tinygrad_nv.train.data import Batch
from tinygrad_nv.train.network import parameters
from tinygrad_nv.train.objectives import Inputs, LossOptions, Supervised, cross_entropy
from tinygrad_nv.train.optimizers import Optimizer
from tinygrad_nv.train.parts import Named, Parts
from tinygrad_nv.train.ranks import OneRank
from tinygrad_nv.train.stages import Stages
from tinygrad_nv.train.step import LOSS, Step, capture, first_bad_layer


class StageObjective(Supervised):
    """The loss of a pipeline, of which this process has a stage."""

    def pass_on(self, x: Tensor | None) -> Tensor:
        """Hidden states (rows, width, hidden) that this stage makes of those of the stage before, or of the
        batch."""
        batch = self.inputs.of(self.model, self.options.documents)
        return self.model.run_layers(self.model.embed(self.inputs.tokens) if x is None else x, batch)

    def loss(self, x: Tensor) -> Tensor:
        """The sum over the batch, of the last stage's input."""
        hidden = self.model.norm(self.pass_on(x))
        return cross_entropy(self.model, hidden, self.inputs, self.options, "sum")


class PipelineStep(Step):
    """A `Step` of this rank's stages."""

    def __init__(self, stages: Stages, inputs: Inputs, options: LossOptions, optimizer: Optimizer,
                 parts: Parts, ranks: OneRank) -> None:
        rows, width = (int(n) for n in inputs.tokens.shape)
        objectives = {number: StageObjective(model, rows, width, options, inputs)
                      for number, model in stages.models.items()}
        model, order, pipe = stages.first, stages.order, stages.pipe
        super().__init__(next(iter(objectives.values())), optimizer, order.microbatches, parts, ranks)
        self.pipe, self.order, self.dtype, self.device = pipe, order, model.dtype, model.device
        self.shape = rows, width, model.config.hidden_size
        self.stages = {number: StagePasses(self, each, number, order)
                       for number, each in objectives.items()}
        self.pipeline = Pipeline(order, pipe, self.stages, self.shape, self.dtype, self.device)
        self._batches: Sequence[Batch] = ()
        self._count, self.found = 1, np.zeros(1)

    def _pass_on(self, batches: Sequence[Batch], count: int) -> np.ndarray:
        self._batches, self._count, self.found = batches, count, np.zeros(1)
        self.pipeline.run()
        return self.found

    def fill(self, microbatch: int) -> None:
        """Puts a micro-batch into the buffers."""
        self.objective.fill(self._batches[microbatch], self._count, self._number(microbatch))

    def evaluate(self, batch: Batch) -> np.ndarray:
        """The sums of a batch on the last stage's rank, zeros on others."""
        self.objective.fill(batch, 1, 0)
        with Context(TRAINING=0): made = self.through(lambda stage, x: stage.score(x))
        return np.zeros(1) if made is None else made.numpy().astype(np.float64)

    def first_bad(self, documents: bool) -> str:
        """The first layer of this rank's stages with a value that is not finite, of the batch in the
        buffers."""
        found = [LOSS]

        def check(stage: StagePasses, x: Tensor | None) -> Tensor:
            mine = x is None or finite(x)
            bad, made = first_bad_layer(stage.objective.model, self.inputs, documents, x)
            if mine and bad != LOSS: found.insert(0, bad)
            return made
        with Context(TRAINING=1): self.through(check)
        return found[0]

    def through(self, passed: Callable[[StagePasses, Tensor | None], Tensor]) -> Tensor | None:
        """Returns what the last stage makes of what those before it hand on, on its rank."""
        x, own = None, self.pipe.rank
        for number in range(self.order.stages):
            before, here = self.order.rank_of(number - 1), self.order.rank_of(number)
            if number and before != here:
                if own == before:
                    assert x is not None
                    send(x, self.pipe, here, "hidden states").realize()
                elif own == here:
                    x = recv(self.shape, self.dtype, self.pipe, before, "hidden states", self.device)
                    x = x.realize()
            if own == here: x = passed(self.stages[number], x if number else None)
        return x if own == self.order.rank_of(self.order.stages - 1) else None


class StagePasses:
    """The passes of stage `number`, as a `Pipeline` calls them."""

    def __init__(self, step: PipelineStep, objective: StageObjective, number: int, order: Schedule) -> None:
        self.step, self.objective = step, objective
        self.first, self.last = number == 0, number == order.stages - 1
        self.names = tuple(parameters(objective.model))
        self._given, self._gradients = dict[int, Tensor | None](), dict[int, Tensor | None]()
        self._forward, self._score = capture(self._make), capture(self._compute_score)
        self._back = capture(self._both if not order.splits else self._input_alone)
        self._behind = capture(self._parameters_alone)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Hidden states for the next stage; of the last nothing, whose loss comes with its gradient."""
        self._given[microbatch] = x
        if self.last: return None
        self.step.fill(microbatch)
        made: Tensor = self._forward(*_some(x))
        return made

    def backward(self, microbatch: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        """The gradient of the stage's input; `weights`: with those of parameters."""
        x = self._given[microbatch]
        if weights: del self._given[microbatch]
        else: self._gradients[microbatch] = grad
        if not weights and self.first: return None      # it has no input
        self.step.fill(microbatch)
        dx, sums = self._back(*_some(x, grad))
        if sums is not None: self.step.found += sums.numpy()
        made: Tensor | None = dx
        return made

    def weights(self, microbatch: int) -> None:
        """Adds up gradients of parameters."""
        self.step.fill(microbatch)
        self._behind(*_some(self._given.pop(microbatch), self._gradients.pop(microbatch)))

    def score(self, x: Tensor | None) -> Tensor:
        """Hidden states, or of the last stage the sum of the loss, (1,)."""
        made: Tensor = self._score(*_some(x))
        return made

    # **** captured ****

    def _make(self, *x: Tensor) -> Tensor:
        return self.objective.pass_on(*(x or (None,))).contiguous().realize()

    def _compute_score(self, *x: Tensor) -> Tensor:
        return self.objective.loss(*x).reshape(1).contiguous().realize() if self.last else self._make(*x)

    def _both(self, *given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dx, sums, gradients = self._derive(given, True, True)
        Tensor.realize(*_some(dx, sums), *self.step.accumulate(gradients))
        return dx, sums

    def _input_alone(self, *given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dx, sums, _ = self._derive(given, True, False)
        Tensor.realize(*_some(dx, sums))
        return dx, sums

    def _parameters_alone(self, *given: Tensor) -> None:
        Tensor.realize(*self.step.accumulate(self._derive(given, False, True)[2]))

    def _derive(self, given: Sequence[Tensor], inputs: bool, weights: bool
                 ) -> tuple[Tensor | None, Tensor | None, Named]:
        """The gradient of the stage's input, the sums of its loss, and the gradients of its parameters, of
        what there is and is asked for. `given`: the input, but of the first stage, and the gradient of its
        result, but of the last."""
        step, x, grad = self.step, None if self.first else given[0], None
        if self.last:
            assert x is not None
            made = self.objective.loss(x)
            sums, made = made.reshape(1).contiguous(), made / step.inputs.count.reshape(())
            if (scaler := step.optimizer.loss_scaler) is not None:
                made = made * scaler.scale.detach().reshape(())
        else: sums, made, grad = None, self.objective.pass_on(x), given[-1]
        own = self.names if weights else ()
        wanted = [*(step.parameters[name] for name in own), *(_some(x) if inputs else ())]
        found = made.gradient(*wanted, gradient=grad)
        dx = found[-1].contiguous() if inputs and x is not None else None
        return dx, sums, step.each(dict(zip(own, found, strict=False))) if weights else Named()


def _some(*given: Tensor | None) -> list[Tensor]: return [each for each in given if each is not None]
