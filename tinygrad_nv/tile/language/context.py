"""Context of a program: the block of the result that it makes.

Protocol. A kernel without `grid=` has one program for each block of its result, whose last two axes are cut
into blocks of the schedule and whose leading axes are the batch:

    context().m     block of `block_m` rows of the result, or of the elements of one with one axis
                                                                  program axis 0
    context().n     block of `block_n` columns of the result      program axis 1, where its start is used
    context().k     `block_k` elements of a reduction: a size for tile.range_k
    context().d     the whole last axis of the first tensor
    context().batch the number of the matrix                      program axis 2

An axis of the grid has one program where nothing depends on it. A block that indexes an axis of an output has
to reach its end, and where the result's shape is only supposed (that of the first tensor), also an axis of a
tensor that is loaded: else programs would leave out some of it.

A tensor's leading axes are indexed with those of the batch that are aligned with them from the right: with
the same index where extents agree, with 0 where the tensor has 1, and with index // (batch / extent) where
its extent divides the batch's (grouped queries).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.control import Range, blocks
from tinygrad_nv.tile.language.ir import Line, TileType
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.language.trace import current, fail
from tinygrad_nv.tile.language.values import Operand, Tile, scalar


def active() -> Context | None:
    """The context of the kernel that this thread writes."""
    found: Context | None = current().context
    return found


class _PlacedBlock(Block):
    """The program's block of rows (axis 0) or columns (1)."""

    def __init__(self, context: Context, axis: int, size: int, start: Tile | None = None) -> None:
        super().__init__(0, size)
        self.context, self.axis, self.place = context, axis, start

    @property
    def start(self) -> Tile:
        self.context.used.add(self.axis)
        return _number(self.axis) * self.size if self.place is None else self.place


@dataclass(frozen=True)
class _Indexed:
    """An axis that the program's block indexes."""
    tensor: TensorRef
    at: int
    axis: int
    line: Line | None


class Context:
    """Blocks of the program. `first` is the kernel's first tensor, `result` the shape that it makes,
    `supposed` whether no annotation says it. `used` has the axes of the grid that something depends on."""

    def __init__(self, first: TensorRef, result: tuple[int, ...], schedule: TileSchedule,
                 supposed: bool = False) -> None:
        self.first, self.result, self.schedule, self.supposed = first, result, schedule, supposed
        self.used: set[int] = set()
        self.indexed: list[_Indexed] = []

    @property
    def m(self) -> Block:
        """The program's rows of the result."""
        size = self.schedule.block_m
        return _PlacedBlock(self, 0, size, _number(0) * size)     # outside of loops

    @property
    def n(self) -> Block:
        """The program's columns of the result, or a size for tile.range_n."""
        return _PlacedBlock(self, 1, self.schedule.block_n)

    @property
    def k(self) -> Block:
        """A block of a reduction."""
        return Block(0, self.schedule.block_k)

    @property
    def d(self) -> Block:
        """The whole last axis of the first tensor."""
        return Block(0, self.first.shape[-1])

    @property
    def batch(self) -> Tile:
        """The number of the matrix of the result."""
        self.used.add(2)
        return _number(2)

    @property
    def vector(self) -> int: return self.schedule.vector_width

    @property
    def stages(self) -> int: return self.schedule.depth

    @property
    def lead(self) -> tuple[int, ...]: return self.result[:-2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many programs there are."""
        counts = (-(-self._extent(0) // self.schedule.block_m), -(-self._extent(1) // self.schedule.block_n),
                  math.prod(self.lead))
        x, y, z = (count if axis in self.used else 1 for axis, count in enumerate(counts))
        return x, y, z

    def _extent(self, axis: int) -> int:
        """Rows or columns of the result; those of one with one axis are its elements."""
        tail = self.result[-2:] or (1,)
        return tail[0 if axis == 0 else -1]

    def index(self, tensor: TensorRef, entries: Sequence[Any]) -> None:
        """Notes which axes of a tensor the program's blocks index."""
        self.indexed += [_Indexed(tensor, at, one.axis, current().line())
                         for at, one in enumerate(entries) if isinstance(one, _PlacedBlock)]

    def check(self) -> None:
        """Raises `LanguageError` for a tensor of which programs leave out some."""
        for each in self.indexed:
            extent, whole = each.tensor.shape[each.at], self._extent(each.axis)
            size = (self.schedule.block_m, self.schedule.block_n)[each.axis]
            left_out = extent > -(-whole // size) * size if each.tensor.parameter.output else \
                self.supposed and extent != whole
            if not left_out: continue
            what, name = ("rows", "m") if each.axis == 0 else ("columns", "n")
            shape = f"the result's shape {self.result}" + " (the first tensor's)" * self.supposed
            fail(f"axis {each.at} of {each.tensor} has {extent} elements, {shape} has {whole} {what}, and "
                 f"context().{name} is a block of these", f"an axis of {whole}",
                 'annotate the result: def kernel(…) -> OTile["M", "N", f32], or give a grid=', each.line)

    def leading(self, extents: Sequence[int], tensor: TensorRef) -> list[Tile]:
        """Indices of a tensor's leading axes."""
        rest, indices = self.batch, list[Tile]()
        for extent in reversed(self.lead):
            indices.insert(0, rest % extent if len(self.lead) > 1 else rest)
            rest = rest // extent if len(self.lead) > 1 else rest
        if len(extents) > len(indices):
            fail(f"{len(extents)} leading axes of {tensor} that no index names, in a batch of {self.lead}",
                 "at most as many as the result has")
        aligned = zip(extents, indices[len(indices) - len(extents):],
                      self.lead[len(self.lead) - len(extents):],
                      strict=True)
        return [self._align_index(extent, index, whole, tensor) for extent, index, whole in aligned]

    def _align_index(self, extent: int, index: Tile, whole: int, tensor: TensorRef) -> Tile:
        if extent == whole: return index
        if extent == 1: return scalar(0, dtypes.int32)
        if whole % extent == 0: return index // (whole // extent)
        fail(f"a leading axis of {extent} of {tensor} in a batch of {whole}",
             f"{whole}, 1, or a divisor of {whole}")


def context() -> Context:
    """The program's place in the result. Raises `LanguageError` in a kernel with a grid of its own."""
    found = active()
    if found is None:
        fail("tile.context() in a kernel with grid=", "a kernel whose programs follow its result",
             "use tile.program_id(axis) and tile.block(start, size)")
    return found


def program_id(axis: int) -> Tile:
    """The program's number along an axis of the grid: int32. Raises `LanguageError` where programs follow
    the result."""
    if axis not in (0, 1, 2): fail(f"tile.program_id({axis})", "0, 1 or 2")
    if active() is not None:
        fail("tile.program_id in a kernel without grid=", "a kernel that says how many programs there are",
             "write @kernel(grid=…), or use tile.context(): its m, n and batch")
    return _number(axis)


def _number(axis: int) -> Tile:
    return Tile(current().emit("program_id", (), [TileType(dtypes.int32)], {"axis": axis})[0])


def block(start: Operand, size: Any) -> Block:
    """`size` elements from `start` on, as an index of a tensor."""
    return Block(start, int(size))


# **** loops over an axis ****

def _extent(of: Any, axis: int) -> Any:
    if isinstance(of, TensorRef): of = of.shape
    if isinstance(of, tuple): return of[axis]
    return of


def range_m(of: Any, block: Any, **options: Any) -> Range:
    """Blocks of rows: of a tensor, of a shape (its second axis from the end), or of so many rows."""
    return blocks(_extent(of, -2), block, **options)


def range_n(of: Any, block: Any, **options: Any) -> Range:
    """Blocks of keys: of the rows of a tensor or of a shape, or of so many."""
    return blocks(_extent(of, -2), block, **options)


def range_k(of: Any, block: Any, **options: Any) -> Range:
    """Blocks of a reduction: of the last axis of a tensor or of a shape, or of so many elements."""
    return blocks(_extent(of, -1), block, **options)
