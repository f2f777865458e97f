"""Runs a pipeline schedule: this rank's passes, and the tensors that it sends and receives between them.

Protocol. `Pipeline(schedule, group, stages, shape, dtype)` has this rank's stages by their numbers; all
stages hand on tensors of one shape and dtype, those of a microbatch. `run()` runs a schedule once over all
microbatches and returns the last stage's results, losses, by microbatch; ranks without that stage return
nothing. Gradients of parameters add up, as after several calls of `backward`.

`steps(schedule)` are a rank's passes with `Transfer`s between them. Transfers of all ranks stand in one
order of time, that of the schedule run on paper (check.py), and each rank does its own transfers in that
order: so ranks do not wait for each other in a circle, even where a send ends only when it is received. The
result of a pass is sent at once; a tensor for a stage on the same rank is kept. A transfer is a captured
program; what is received is in one of as many places as are in use at a time (`rooms`), where it stays until
the last pass that needs it.

A stage is any object with `forward`, `backward` and `weights` (`Stage`). `Recomputed` makes one of a
function: it keeps a stage's input, and computes the stage again in the backward pass, and once more for W.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinygrad import Tensor, TinyJit
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import recv, send
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.check import check
from tinygrad_nv.dist.train.schedules import Op, Schedule
from tinygrad_nv.errors import DistError


class Stage(Protocol):
    """Part of a network. `x` is None for the first stage, `grad` for the last. With `weights`, `backward`
    computes gradients of parameters, too; without, `weights` is called later. Results are realized. That of
    the last stage's `forward`, which no stage waits for, may be None."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None: ...

    def backward(self, microbatch: int, grad: Tensor | None, weights: bool) -> Tensor | None: ...

    def weights(self, microbatch: int) -> None: ...


@dataclass(frozen=True)
class Transfer:
    """The result of `made` goes from rank `source` to rank `to`, for `used`."""
    made: Op
    used: Op
    source: int
    to: int


PipelineStep = Op | Transfer


def steps(schedule: Schedule) -> tuple[tuple[PipelineStep, ...], ...]:
    """Returns the steps of each rank, in order. Raises `DistError` for a schedule that cannot run."""
    report = check(schedule)
    # a transfer is made when its pass ends: before passes that begin then, behind those that begin before
    made: list[list[tuple[tuple[float, int, int], PipelineStep]]] = [[] for _ in schedule.ranks]
    for rank, ops in enumerate(schedule.ranks):
        for i, op in enumerate(ops):
            made[rank].append(((report.begins[op], 1, i), op))
            for used in uses(schedule, op):
                to = schedule.rank_of(used.stage)
                if to == rank: continue
                key = report.ends[op], 0, rank
                for one in (rank, to): made[one].append((key, Transfer(op, used, rank, to)))
    return tuple(tuple(step for _, step in sorted(own, key=lambda each: each[0])) for own in made)


def uses(schedule: Schedule, op: Op) -> list[Op]:
    """The pass that gets the result of another."""
    stage = op.stage + {"F": 1, "B": -1, "W": schedule.stages}[op.kind]
    return [Op(op.kind, stage, op.microbatch)] if 0 <= stage < schedule.stages else []


def rooms(schedule: Schedule, order: Sequence[PipelineStep], rank: int) -> dict[Op, int]:
    """Returns, of each pass of a rank that gets what another rank sends, the number of the place where it is.
    A stage's input is kept until the last pass of the microbatch, the gradient of its result, too, where
    passes are split."""
    last, made = "W" if schedule.splits else "B", dict[Op, int]()
    held = dict[tuple[int, int], set[int]]()    # by stage and microbatch
    for step in order:
        if isinstance(step, Transfer):
            if step.source == rank: continue
            used, taken = step.used, set[int]().union(*held.values())
            made[used] = next(i for i in range(len(taken) + 1) if i not in taken)
            held.setdefault((used.stage, used.microbatch), set()).add(made[used])
        elif step.kind == last: held.pop((step.stage, step.microbatch), None)
    return made


class Pipeline:
    """Part of a pipeline that this rank has. Stages compute on `device` (default: tinygrad's)."""

    def __init__(self, schedule: Schedule, group: Group, stages: Mapping[int, Stage], shape: Sequence[int],
                 dtype: DType, device: str | None = None) -> None:
        if len(schedule.ranks) != group.size:
            raise DistError(f"a schedule of {len(schedule.ranks)} ranks in a group of {group.size}",
                            "as many ranks", "make the schedule for the group's size")
        wanted = [s for s in range(schedule.stages) if schedule.rank_of(s) == group.rank]
        if sorted(stages) != wanted:
            raise DistError(f"rank {group.rank} has stages {sorted(stages)}", f"{wanted}, by the schedule")
        self.schedule, self.group, self.stages = schedule, group, dict(stages)
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.steps = steps(schedule)[group.rank]
        self.room: dict[Op, Tensor] = {}    # what passes to come get
        self._rooms = rooms(schedule, self.steps, group.rank)
        self._transfers: dict[tuple[object, ...], Any] = {}

    def run(self) -> dict[int, Tensor]:
        """Runs all passes. Results of the last stage, by microbatch."""
        results = dict[int, Tensor]()
        for step in self.steps:
            if isinstance(step, Transfer): self._transfer(step)
            elif (made := self._pass(step)) is not None:
                if step.kind == "F" and step.stage + 1 == self.schedule.stages:
                    results[step.microbatch] = made
                for used in uses(self.schedule, step): self.room[used] = made
        assert not self.room, self.room
        return results

    def _pass(self, op: Op) -> Tensor | None:
        stage, given = self.stages[op.stage], self.room.pop(op, None)
        if op.kind == "F": return stage.forward(op.microbatch, given)
        if op.kind == "B": return stage.backward(op.microbatch, given, not self.schedule.splits)
        stage.weights(op.microbatch)
        return None

    def _transfer(self, step: Transfer) -> None:
        name = f"{step.made.kind} of stage {step.made.stage}"
        if step.source == self.group.rank:
            given = self.room.pop(step.used)
            if given.shape != self.shape or given.dtype != self.dtype:
                raise DistError(f"{step.made} makes {given.dtype.name} {given.shape}",
                                f"{self.dtype.name} {self.shape}, as all stages hand on")
            self._capture((step.to, name), lambda x: send(x, self.group, step.to, name).realize())(given)
        else:
            received = self._capture((step.source, name, self._rooms[step.used]), lambda: recv(
                self.shape, self.dtype, self.group, step.source, name, self.device).realize())
            self.room[step.used] = received()

    def _capture(self, key: tuple[object, ...], program: Callable[..., Tensor]) -> Any:
        """A transfer as a TinyJit, which captures at its first call."""
        if key not in self._transfers:
            self._transfers[key] = made = TinyJit(program)
            made.cnt = 1
        return self._transfers[key]


@dataclass
class Recomputed:
    """A stage of a function: `function(x, *data(microbatch))`, without x for the first stage. `parameters`
    get their gradients."""
    function: Callable[..., Tensor]
    parameters: Sequence[Tensor]
    data: Callable[[int], tuple[Tensor, ...]] = lambda microbatch: ()
    inputs: dict[int, Tensor | None] = field(default_factory=dict)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """The function's result."""
        self.inputs[microbatch] = x
        return self._call(microbatch, x).realize()

    def backward(self, microbatch: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        """The gradient of x."""
        x = self.inputs[microbatch]
        if not weights: self.gradients[microbatch] = grad
        else: del self.inputs[microbatch]
        return self._derive(microbatch, x, grad, x is not None, weights)

    def weights(self, microbatch: int) -> None:
        """Gradients of parameters, of a backward pass before."""
        self._derive(microbatch, self.inputs.pop(microbatch), self.gradients.pop(microbatch), False, True)

    def _call(self, microbatch: int, x: Tensor | None) -> Tensor:
        return self.function(*(() if x is None else (x,)), *self.data(microbatch))

    def _derive(self, microbatch: int, x: Tensor | None, grad: Tensor | None, inputs: bool,
                 weights: bool) -> Tensor | None:
        wanted = [*([x] if inputs and x is not None else []), *(self.parameters if weights else [])]
        if not wanted: return None
        made = self._call(microbatch, x).gradient(*wanted, gradient=grad)
        dx = made.pop(0).contiguous() if inputs else None
        for parameter, own in zip(self.parameters if weights else (), made, strict=True):
            parameter.grad = own if parameter.grad is None else parameter.grad + own
        Tensor.realize(*([dx] if dx is not None else []),
                       *(each.grad for each in self.parameters if weights and each.grad is not None))
        return dx
