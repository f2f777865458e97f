"""The gradient of rows of a table by number (spec.py): three kernels. For sm_80 and later.

    sort:      offsets and order of the tokens by their rows (sorting.py)
    segments:  each warp has SEGMENT places of the order, and a slice of columns:
        where SEGMENT tokens of a row begin there, counted from the row's first: their sum, to the workspace
    rows:      each warp has ROWS rows, WARPS apart, and a slice of columns; of each row:
        add up the sums of its segments, then the tokens after the last of them; round, store

A row that has no token is stored as it is added up: 0. Frequent tokens have neighbouring numbers, so those
of a CTA are spread over its warps. A row of many tokens is the work of as many warps as
it has segments, and of one that adds up a SEGMENT-th of it: of 16384 tokens of one row, 768 wide, 512 vectors
a thread. Nothing is added by atomics, so that the bits depend on the tokens alone.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read_vector, write_vector
from tinygrad_nv.tile.embedding.kernel import load_row_index, token_place
from tinygrad_nv.tile.embedding.sorting import sort_tokens
from tinygrad_nv.tile.embedding.spec import SEGMENT, EmbeddingGradientSpec
from tinygrad_nv.tile.embedding.templates import GradientPlan
from tinygrad_nv.tile.kernel import RowSumsKernel, TileKernel
from tinygrad_nv.tile.lanes import Lanes, convert
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

WARPS = 8       # of a CTA
ROWS = 8        # of a warp
DEEP = 4        # rows of the gradient that a warp loads together
THREADS = 32 * WARPS


def gradient(spec: EmbeddingGradientSpec, schedule: Schedule, gpu: GPU) -> RowSumsKernel:
    """The kernels. Parameters in this order: out; workspace; tokens; grad."""
    plan = GradientPlan.of(spec)
    sums = [_sums(plan, gpu, "embedding_rows", -(-spec.rows // (ROWS * WARPS)))]
    if plan.segments: sums.insert(0, _sums(plan, gpu, "embedding_segments", -(-plan.segments // WARPS)))
    return RowSumsKernel((sort_tokens(plan, gpu.arch), *sums), plan.words, plan.sort_tokens)


def _sums(plan: GradientPlan, gpu: GPU, name: str, ctas: int) -> TileKernel:
    kb = Kernel(name, arch=gpu.arch, threads=THREADS)
    made = _Sums(kb, plan)
    if name == "embedding_rows": made.rows()
    else: made.segments()
    return TileKernel(name, kb.ptx(), (plan.slices * ctas, 1, 1), THREADS, pdl=kb.hopper)


class _Sums:
    """A kernel of sums under construction: a warp, and its slice of columns."""

    def __init__(self, kb: Kernel, plan: GradientPlan) -> None:
        self.kb, self.plan, self.spec = kb, plan, plan.spec
        self.out, self.workspace, self.tokens, self.grad = (
            kb.pointer(each) for each in ("out", "work", "tokens", "grad"))
        self.lane, self.cta = kb.special("laneid"), kb.ctaid.x // plan.slices
        self.warp = self.cta * WARPS + (kb.tid.x >> 5)
        self.column = (kb.ctaid.x % plan.slices * 32 + self.lane) * plan.vector
        self.inside = None if plan.spec.width % (32 * plan.vector) == 0 else self.column < plan.spec.width
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()

    # **** what is added up ****

    def cells(self, base: Value, row: Value, dtype: DType) -> Value:
        """Returns the address at which the thread's columns of a row lie: u64."""
        at = advance(self.kb, base, self.column, dtype.itemsize)
        return advance(self.kb, at, row, self.spec.width * dtype.itemsize)

    def add(self, totals: Sequence[Value], base: Value, rows: Sequence[Value], there: Sequence[Value],
            dtype: DType) -> None:
        """Adds rows, where they are there, all of which are loaded before."""
        loaded = [read_vector(self.kb, self.cells(base, row, dtype), 0, dtype, self.plan.vector,
                              guard if self.inside is None else guard & self.inside)
                  for row, guard in zip(rows, there, strict=True)]
        for lanes in loaded:
            values = [each.register(i) for each in lanes for i in range(min(2, self.plan.vector))]
            for total, value in zip(totals, values, strict=True):
                self.kb.emit("add.f32", total, total, value)

    def add_tokens(self, totals: Sequence[Value], first: Value, count: Value | int) -> None:
        """Adds up to SEGMENT tokens of the order, from place `first` on."""
        kb = self.kb
        number, many = kb.reg("u32", 0), kb.reg("u32", count)
        at = advance(kb, advance(kb, self.workspace, first, 4), self.lane, 4)
        kb.emit("ld.global.u32", number, at.at(4 * self.plan.order_at), guard=self.lane < many)
        with kb.loop(0, many, DEEP, kind="u32") as begin:
            rows = [self.from_lane(number, begin + i) for i in range(DEEP)]
            self.add(totals, self.grad, rows, [begin + i < many for i in range(DEEP)], self.spec.dtype)

    def add_segments(self, totals: Sequence[Value], first: Value, count: Value) -> None:
        """Adds partial sums, from number `first` on."""
        with self.kb.loop(0, count, DEEP, kind="u32") as begin:
            rows = [first + begin + i for i in range(DEEP)]
            self.add(totals, self.partials, rows, [begin + i < count for i in range(DEEP)], dtypes.float32)

    @property
    def partials(self) -> Value:
        """Returns the address at which sums of segments lie."""
        return self.workspace + 4 * self.plan.partials_at

    def from_lane(self, value: Value, lane: Value) -> Value:
        """A lane's value."""
        made = self.kb.reg("u32")
        self.kb.emit("shfl.sync.idx.b32", made, value, lane, 31, -1)
        return made

    def store(self, base: Value, row: Value, totals: Sequence[Value], dtype: DType) -> None:
        """Rounds and stores the thread's columns of a row."""
        width = min(2, len(totals))
        made = [convert(Lanes(self.kb, dtypes.float32, list(totals[i:i + width])), dtype)
                for i in range(0, len(totals), width)]
        write_vector(self.kb, self.cells(base, row, dtype), 0, made, self.inside)

    # **** the kernels ****

    def segments(self) -> None:
        """The sum of the segment that begins in this warp's places of the order."""
        kb, plan = self.kb, self.plan
        last = (self.warp + 1) * SEGMENT - 1
        sorted_ = kb.ld("global", "u32", self.workspace.at(4 * self.spec.rows))[0]
        with kb.if_((self.warp < plan.segments) & (last < sorted_)):
            # only the row that has the last place can have a segment that begins here and is whole
            token = kb.ld("global", "u32", advance(kb, self.workspace, last, 4).at(4 * plan.order_at))[0]
            row = load_row_index(kb, self.spec, token_place(kb, self.spec, self.tokens, token))
            at = advance(kb, self.workspace, row, 4)
            begin, end = (kb.ld("global", "u32", at.at(4 * i))[0] for i in range(2))
            first = last - (last - begin) % SEGMENT
            with kb.if_(first + SEGMENT <= end):
                totals = kb.regs("f32", plan.vector, 0.0)
                self.add_tokens(totals, first, SEGMENT)
                self.store(self.partials, self.warp, totals, dtypes.float32)

    def rows(self) -> None:
        """The rows of this warp."""
        kb, rows = self.kb, self.spec.rows
        first = self.cta * (ROWS * WARPS) + (kb.tid.x >> 5)
        offset, place = kb.reg("u32", 0), first + (self.lane >> 1) * WARPS + (self.lane & 1)
        kb.emit("ld.global.u32", offset, advance(kb, self.workspace, place, 4).at(), guard=place <= rows)
        with kb.loop(0, 2 * ROWS, 2, kind="u32") as i:
            row = first + i * (WARPS // 2)
            kb.break_(row >= rows)
            begin, end = self.from_lane(offset, i), self.from_lane(offset, i + 1)
            totals = kb.regs("f32", self.plan.vector, 0.0)
            whole, left = (end - begin) // SEGMENT, (end - begin) % SEGMENT
            if self.plan.segments: self.add_segments(totals, begin // SEGMENT, whole)
            with kb.if_(left != 0): self.add_tokens(totals, begin + whole * SEGMENT, left)
            self.store(self.out, row, totals, self.spec.dtype)
