"""A thread's row and the vectors of it that it has, as expressions read them (kernel.py)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.expression import Expression, Load
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.norm.templates import Norm

Vector = list[Lanes]    # pairs of elements that lie side by side, or one element


class Row:
    """A thread's row, as what expressions read: indices, and numbers of the row by what stands for them."""

    def __init__(self, kb: Kernel, spec: NormSpec, plan: Norm, rows: Value | int) -> None:
        if plan.rows == 1: self.m, lane = kb.ctaid.x, kb.tid.x
        else: self.m, lane = kb.ctaid.x * plan.rows + kb.tid.x // plan.team, kb.tid.x % plan.team
        whole = plan.rows == 1 or (not spec.symbolic and spec.m % plan.rows == 0)
        self.kb, self.there = kb, None if whole else self.m < rows
        self.first = lane * plan.vector  # of the thread's elements
        if plan.blocks > 1: self.first = self.first + kb.ctaid.z * (plan.span * plan.chunks)
        self.batch, rest = list[Value](), kb.ctaid.y
        for extent in reversed(spec.batch):
            self.batch.insert(0, rest % extent)
            rest = rest // extent
        self.known: dict[Expression, Lanes] = {}
        self.groups: dict[Expression, list[Lanes]] = {}     # numbers of the groups of the thread's vectors

    def address(self, pointer: Value, lies: Load | Result, group: int = 0) -> Value:
        """Returns the address at which the thread's first element, or its group, lies."""
        size = lies.dtype.itemsize
        at = pointer + lies.offset * size if lies.offset else pointer
        strides = (*(lies.batch or [0] * len(self.batch)), lies.m, lies.n)
        column = self.first // group if group else self.first
        for index, stride in zip((*self.batch, self.m, column), strides, strict=True):
            at = advance(self.kb, at, index, stride * size)
        return at

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: raise AssertionError("known by name")

    def load(self, load: Load, row: int, pair: int) -> Lanes: return self.known[load]

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        return [(self.m if axis == "m" else self.batch[int(axis)]).to("s32")]


@dataclass
class Elements:
    """Chunks of a row, as what expressions read: `pair` is chunk · vector + element. `vectors` are loads that
    have been made."""
    row: Row
    plan: Norm
    first: Value
    chunks: Sequence[int]
    inside: Callable[[int], Value | None]
    vectors: dict[Load, dict[int, Vector]]
    outs: list[Value]

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: raise AssertionError("known by name")

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        if load in self.row.known: return self.row.known[load]
        chunk, element = divmod(pair, self.plan.vector)
        if load in self.row.groups: return self.row.groups[load][chunk]
        made = self.vectors[load][chunk][element // 2]
        # in memory's form: conversions are cheaper than registers
        return Lanes(made.kb, made.dtype, [] if made.packed is not None else made.wide, made.packed)

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        if axis != "n": return self.row.position(axis, row, pair)
        chunk, element = divmod(pair, self.plan.vector)
        start = chunk * self.plan.span + element
        return [(self.first + (start + i)).to("s32") for i in range(min(2, self.plan.vector))]

    def pairs(self, chunk: int) -> range:
        """Pairs of a chunk."""
        return range(chunk * self.plan.vector, (chunk + 1) * self.plan.vector, min(2, self.plan.vector))
