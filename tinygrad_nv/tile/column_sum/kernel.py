"""Sums of columns in a fixed order (spec.py). For sm_80 and later.

    each CTA has the columns of a warp's vectors, and one group of rows:
        wait for the kernel before; the kernel after may begin
        each warp, for every WARPS-th row of the group, TOGETHER at a time:
            load vectors and numbers of the rows; add the terms up in registers
        through shared memory: of each column the sums of the warps, in their order
    of several groups, float32 sums [groups, n]; the same kernel adds these up

No sum depends on which CTA runs first: no atomics. Rows are read once, by whole lines.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read, read_vector, write
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.column_sum.templates import TOGETHER, WARPS, ColumnSum
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Load, loads
from tinygrad_nv.tile.kernel import Chain, Scratch, TileKernel
from tinygrad_nv.tile.lanes import Lanes, convert
from tinygrad_nv.tile.template import GPU

THREADS = 32 * WARPS


def column_sum(spec: ColumnSumSpec, plan: ColumnSum, gpu: GPU) -> TileKernel | Chain:
    """The kernel, or both where rows have groups. Parameters in this order: out [n], or float32 [groups, n];
    x0, x1, …"""
    if plan.groups == 1: return _kernel(spec, plan, gpu)
    between = ColumnSumSpec(plan.groups, spec.n, Load(0, dtypes.float32, spec.n, 1), spec.dtype)
    last = ColumnSum(ColumnSum.of(between).vector)
    return Chain(_kernel(spec, plan, gpu), _kernel(between, last, gpu),
                 Scratch(dtypes.float32, plan.groups * spec.n))


def _kernel(spec: ColumnSumSpec, plan: ColumnSum, gpu: GPU) -> TileKernel:
    kb = Kernel("column_sum", arch=gpu.arch, threads=THREADS)
    _Columns(kb, spec, plan).write()
    grid = (-(-spec.n // plan.span), plan.groups, 1)
    return TileKernel(kb.name, kb.ptx(), grid, THREADS, pdl=kb.hopper)


@dataclass
class _Row:
    """A row as a thread has loaded it, as expressions read it: vectors, and numbers of the row."""
    found: dict[Load, list[Lanes]]
    m: Value
    first: Value
    width: int

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: raise AssertionError("no statistics")

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        return self.found[load][pair // self.width if load.n else 0]

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        if axis == "m": return [self.m.to("s32")]
        return [(self.first + (pair + i)).to("s32") for i in range(self.width)]


class _Columns:
    """The kernel of a spec under construction."""

    def __init__(self, kb: Kernel, spec: ColumnSumSpec, plan: ColumnSum) -> None:
        self.kb, self.spec, self.plan, self.width = kb, spec, plan, min(2, plan.vector)
        self.out = kb.pointer("out")
        self.inputs = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.loads = loads(spec.term)
        self.space = "global" if kb.hopper else "global.nc"     # as of norm/kernel.py
        self.warp, self.lane, self.group = kb.tid.x >> 5, kb.tid.x & 31, kb.ctaid.y
        self.first = (kb.ctaid.x * 32 + self.lane) * plan.vector
        self.sums = kb.shared("sums", 4 * WARPS * plan.span)

    def write(self) -> None:
        """The kernel."""
        kb, spec, plan = self.kb, self.spec, self.plan
        size = -(-spec.m // plan.groups)
        start, end = self.group * size, kb.reg("u32")
        kb.emit("min.u32", end, start + size, spec.m)
        at = [self.address(load) for load in self.loads]
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        totals = kb.regs("f32", plan.vector, 0.0)
        inside = None if spec.n % plan.span == 0 else self.first < spec.n
        with kb.comment("terms of this warp's rows"), \
                kb.loop(0, -(-size // (WARPS * TOGETHER)), kind="u32") as step:
            begin = start + step * (WARPS * TOGETHER) + self.warp
            rows = [self.row(at, begin + i * WARPS if i else begin, end, inside) for i in range(TOGETHER)]
            for row, there in rows: self.add(totals, row, there)
        with kb.comment("sums of the warps"): self.together(totals)

    def address(self, load: Load) -> Value:
        """Returns the address at which the thread's columns of the first row lie."""
        size = load.dtype.itemsize
        at = self.inputs[load.parameter]
        if load.offset: at = at + load.offset * size
        return advance(self.kb, at, self.first, load.n * size)

    def row(self, at: Sequence[Value], m: Value, end: Value, inside: Value | None) -> tuple[_Row, Value]:
        """A row loaded, and whether it is there, with these columns."""
        kb, found = self.kb, dict[Load, list[Lanes]]()
        there = m < end if inside is None else (m < end) & inside
        for load, base in zip(self.loads, at, strict=True):
            place, dtype = advance(kb, base, m, load.m * load.dtype.itemsize), load.dtype
            found[load] = read_vector(kb, place, 0, dtype, self.plan.vector, there, self.space) if load.n \
                else [read(kb, place, 0, dtype, 1, there, self.space)]
        return _Row(found, m, self.first, self.width), there

    def add(self, totals: Sequence[Value], row: _Row, there: Value) -> None:
        """Adds the terms of a row."""
        finish = EpilogueEmitter(self.kb, self.spec.term, row, self.width)
        for pair in range(0, self.plan.vector, self.width):
            value = finish.at(0, pair)
            for i in range(self.width):
                total = totals[pair + i]
                self.kb.emit("add.f32", total, total, value.at(i), guard=there)

    def together(self, totals: Sequence[Value]) -> None:
        """Stores the sums of the CTA's columns, one a thread."""
        kb, spec, span = self.kb, self.spec, self.plan.span
        mine = self.sums.address((self.warp * span + self.lane * self.plan.vector) * 4)
        for i, total in enumerate(totals): kb.emit("st.shared.f32", mine.at(4 * i), total)
        kb.sync()
        column = kb.ctaid.x * span + kb.tid.x
        with kb.if_((kb.tid.x < span) & (column < spec.n)):
            own, made = self.sums.address(kb.tid.x * 4), kb.reg("f32", 0.0)
            for warp in range(WARPS):
                part = kb.reg("f32")
                kb.emit("ld.shared.f32", part, own.at(4 * warp * span))
                made += part
            dtype = spec.dtype if self.plan.groups == 1 else dtypes.float32
            at = advance(kb, advance(kb, self.out, self.group, spec.n * dtype.itemsize), column,
                          dtype.itemsize)
            write(kb, at, 0, convert(Lanes(kb, dtypes.float32, [made]), dtype), 1)
