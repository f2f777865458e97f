"""Coordinates of ranks on the axes along which they share the work of a step.

Protocol: a `Layout` has an extent for each of `AXES`, whose product is the number of ranks. The last axis
counts fastest: ranks 0 and 1 differ in "tensor", where that has 2.

    data      ranks have rows of a batch of their own
    pipeline  ranks have some of the layers
    context   ranks have parts of each row
    tensor    ranks have a part of each layer

`layout.place(rank)` are a rank's coordinates. All ranks of one data coordinate read the same rows and draw
the same dropout; ranks that differ in "data" and "context" alone have the same parameters.
"""
from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product
from math import prod

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.arguments import TrainingArguments

AXES = ("data", "pipeline", "context", "tensor")
ALIKE = ("data", "context")     # along which ranks have the same parameters, and gradients are added up


@dataclass(frozen=True)
class Place:
    """A rank's coordinates."""
    data: int = 0
    pipeline: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class Layout:
    """How many ranks there are along each axis."""
    data: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(astuple(self))

    @property
    def axes(self) -> dict[str, int]:
        """Extents by axis, the last counting fastest."""
        return {axis: getattr(self, axis) for axis in AXES}

    def place(self, rank: int) -> Place:
        """Returns where a rank is."""
        left, made = rank, dict[str, int]()
        for axis in reversed(AXES): left, made[axis] = divmod(left, getattr(self, axis))
        return Place(**made)

    def rank(self, place: Place) -> int:
        """The rank at these coordinates."""
        made = 0
        for axis in AXES: made = made * int(getattr(self, axis)) + int(getattr(place, axis))
        return made

    def members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one in these axes alone, in order; itself among them."""
        own, free = self.place(rank), [axis for axis in AXES if axis in axes]
        return tuple(self.rank(replace(own, **dict(zip(free, each, strict=True))))
                     for each in product(*(range(getattr(self, axis)) for axis in free)))

    def keeper(self, rank: int) -> int:
        """The first rank with the same parameters."""
        return self.members(rank, *ALIKE)[0]

    def counts(self, rank: int) -> bool:
        """Whether figures of a batch, which all ranks of one data coordinate have alike, are taken of this
        rank."""
        return rank == self.rank(Place(data=self.place(rank).data))

    def adds(self, rank: int) -> bool:
        """Whether sums of a loss are added up of this rank: those of tensor parallel ranks are the same, and
        of contexts and stages each has its own, or 0."""
        return self.place(rank).tensor == 0


def layout_of(arguments: TrainingArguments, started: int) -> Layout:
    """The layout of so many started ranks. Raises `ConfigError` where the options make another number."""
    a = arguments
    layout = Layout(1, a.pipeline_parallel_size, a.context_parallel_size, a.tensor_parallel_size)
    data, left = divmod(started, layout.size)
    if not left and a.data_parallel_size in (0, data): return replace(layout, data=data)
    said = {"data": a.data_parallel_size, **{axis: each for axis, each in layout.axes.items() if each > 1}}
    words = " and ".join(f"--{axis}-parallel-size {each}" for axis, each in said.items() if each)
    wanted = f"{layout.size * a.data_parallel_size}" if a.data_parallel_size else \
        f"a multiple of {layout.size}"
    raise ConfigError(f"{words}, and a launcher has started {started} rank{'s' * (started > 1)}",
                      f"{wanted} ranks", "start as many, or leave the option out")


def count_ranks(arguments: TrainingArguments) -> int:
    """How many ranks a command that no launcher started has to start."""
    a = arguments
    return max(a.data_parallel_size, 1) * a.pipeline_parallel_size * a.context_parallel_size * \
        a.tensor_parallel_size
