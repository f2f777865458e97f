"""Functions of a rank's part of a tensor, by axis of a mesh, joined with `>>`.

    step = m.map(lambda x: x @ w) >> m.all_reduce("tp") >> m.scan(lambda a, b: a + b, "dp")
    y = step(x)

`>>` runs its right side on the result of its left. All have gradients; those of collectives are gradients of
the sum of all ranks' losses (collectives/functions.py). An axis is a name, or several names, such as ("dp",
"tp"), which count as one axis.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.dist.collectives import functions
from tinygrad_nv.dist.collectives.functions import shift
from tinygrad_nv.dist.group import Group
from tinygrad_nv.errors import DistError

Axis = str | tuple[str, ...]
Join = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MeshFunction:
    """A function of a tensor, with a name."""
    name: str
    run: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor: return self.run(x)

    def __rshift__(self, then: MeshFunction) -> MeshFunction:
        return MeshFunction(f"{self.name} >> {then.name}", lambda x: then(self(x)))


class Steps:
    """The functions of a mesh, over the groups of its axes."""

    def group(self, *axes: str) -> Group: raise NotImplementedError

    def map(self, fn: Callable[[Tensor], Tensor]) -> MeshFunction:
        """fn, on every rank's part."""
        return MeshFunction(getattr(fn, "__name__", "map"), fn)

    def reduce(self, fn: str | Join, axis: Axis) -> MeshFunction:
        """Reduces all parts along an axis, on every rank, by fn: "sum", "max" or "min"; or a function of two,
        that parts are put into from the left, in the order of ranks."""
        if isinstance(fn, str): return self.all_reduce(axis, fn)
        return self._step("reduce", axis, lambda x, group: functools.reduce(fn, _all(x, group, "reduce")))

    def scan(self, fn: Join, axis: Axis) -> MeshFunction:
        """Joins the parts up to this rank's by fn, which is associative."""
        def run(x: Tensor, group: Group) -> Tensor:
            reach = 1
            while reach < group.size:
                other = shift(x, group, reach, name="scan")
                behind = sum((group.is_rank(r) for r in range(reach + 1, group.size)), group.is_rank(reach))
                x = (behind > 0).where(fn(other, x), x)
                reach *= 2
            return x
        return self._step("scan", axis, run)

    def all_reduce(self, axis: Axis, op: str = "sum") -> MeshFunction:
        """The sum, "max" or "min" of all parts, on every rank."""
        return self._step("all_reduce", axis, lambda x, group: functions.all_reduce(x, group, op))

    def reduce_scatter(self, axis: Axis, dim: int = 0) -> MeshFunction:
        """Returns this rank's part of the sum, along a dimension."""
        return self._step("reduce_scatter", axis, lambda x, group: functions.reduce_scatter(x, group, dim))

    def all_gather(self, axis: Axis, dim: int = 0) -> MeshFunction:
        """All parts, one behind the other along a dimension."""
        return self._step("all_gather", axis, lambda x, group: functions.all_gather(x, group, dim))

    def all_to_all(self, axis: Axis, split: int = 0, concat: int = 0) -> MeshFunction:
        """Part r along `split` goes to rank r; what comes is put along `concat`."""
        return self._step("all_to_all", axis, lambda x, group: functions.all_to_all(x, group, split, concat))

    def shift(self, axis: Axis, by: int = 1) -> MeshFunction:
        """Returns what the rank `by` before this one has, in a circle."""
        return self._step("shift", axis, lambda x, group: shift(x, group, by))

    def pipeline(self, stage: Callable[[Tensor], Tensor], axis: Axis, microbatches: int) -> MeshFunction:
        """The first rank's x through `stage` of every rank of an axis in turn, microbatches of its first
        dimension at a time: the last rank's result, on every rank. A stage keeps shape and dtype, and has to
        bear zeros, which it gets while the pipeline fills. Gradients are those of one loss that all ranks
        compute alike. train/pipeline.py runs other schedules."""
        def run(x: Tensor, group: Group) -> Tensor: return _pipe(stage, x, group, microbatches)
        return self._step("pipeline", axis, run)

    def _step(self, name: str, axis: Axis, run: Callable[[Tensor, Group], Tensor]) -> MeshFunction:
        axes = (axis,) if isinstance(axis, str) else axis
        group = self.group(*axes)
        return MeshFunction(f"{name} over {' x '.join(axes)}", lambda x: run(x, group))


def _pipe(stage: Callable[[Tensor], Tensor], x: Tensor, group: Group, microbatches: int) -> Tensor:
    if int(x.shape[0]) % microbatches:
        raise DistError(f"{microbatches} microbatches of a batch of {x.shape[0]}", "a number that divides it")
    parts = [part.contiguous() for part in x.chunk(microbatches)]
    first, last = (group.is_rank(r) > 0 for r in (0, group.size - 1))
    state, made = parts[0].zeros_like(), list[Tensor]()
    for tick in range(microbatches + group.size - 1):
        came = shift(state, group, name=f"tick {tick}") if tick else state
        state = stage(first.where(parts[min(tick, microbatches - 1)], came)).contiguous()
        if tick >= group.size - 1: made.append(state)
    whole = Tensor.cat(*made)
    return functions.all_reduce(last.where(whole, 0), group, replicated=True, name="pipeline")


def _all(x: Tensor, group: Group, name: str) -> list[Tensor]:
    """The parts of all ranks."""
    whole = functions.all_gather(x.unsqueeze(0), group, name=name)
    return [whole[r] for r in range(group.size)]

