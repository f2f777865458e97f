"""Matmuls with scales of groups by mma.sync: that of gemm/mma/kernel.py, whose stages are groups of K.

    for each group of K:
        start the copies of the group `depth - 1` further on, and of its scales
        read the scales of the warp's rows and columns
        for each step of 32 bytes: all mmas of the warp's tile, into sums of the group, from 0 on
        totals += the group's sums · row's · column's scale

The tensor cores of sm_89 keep 13 bits of an fp8 sum's fraction, as Hopper's do: so these hold for 128 of K.
Where K ends within a group, that group comes first.

Scales of a stage: to shared memory beside its tiles, and from there to the registers of a warp.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel, Operands
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TailFirst, TileCopy, width_of
from tinygrad_nv.tile.scaled_gemm.copy import ScaleCopies
from tinygrad_nv.tile.scaled_gemm.mma.plan import ScaledMmaPlan, Side
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledMma
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, ScaledGemmSpec
from tinygrad_nv.tile.template import GPU

Scales = list[list[Value]]      # by 16 rows or 8 columns: those of a thread's two, or of all


def scaled_mma(spec: ScaledGemmSpec, schedule: ScaledMma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    kb = Kernel("scaled_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return ScaledMmaKernel(kb, ScaledMmaPlan.of(spec, schedule)).emit_kernel()


class ScaledMmaKernel(MmaKernel):
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: ScaledMmaPlan) -> None:
        self.scaled = plan
        super().__init__(kb, plan)

    def declare_params(self) -> Sequence[Value]:
        a, b, *scales = (self.kb.pointer(name) for name in ("a", "b", "a_scale", "b_scale"))
        self.pointers = scales[::-1] if self.schedule.swap else scales
        return (b, a) if self.schedule.swap else (a, b)

    def make_copies(self, a: Value, b: Value) -> None:
        kb, spec, s, plan = self.kb, self.scaled.spec, self.schedule, self.scaled
        residue, made = spec.k % GROUP or GROUP, list[TileCopy]()
        sides = ((spec.a, a, self.first_m, self.rows, s.block_m, 0),
                 (spec.b, b, self.first_n, spec.n, s.block_n, s.block_m * GROUP * spec.a.dtype.itemsize))
        for operand, pointer, first, extent, block, start in sides:
            width = width_of(operand, extent if isinstance(extent, int) else 1, residue)
            made.append(TailFirst(kb, operand, self._place(operand, pointer), first, extent, residue, width,
                                  block, GROUP, start, spec.k))
        group = spec.groups - 1 if plan.ends_within else \
            0 if self.splits.first_k is None else self.splits.first_k // GROUP
        rows, columns = (ScaleCopies(kb, one.scales, pointer, kb.tid.x, s.threads, one.count, extent)
                         for one, pointer, extent in ((plan.row_scales, self.pointers[0], self.rows),
                                                      (plan.column_scales, self.pointers[1], spec.n)))
        rows.begin(self.first_m, group)
        columns.begin(self.first_n, group)
        self.tiles = made
        self.copies = [*made, StageScales(plan, rows, columns, kb.tid.x * 4 + plan.scales_start)]
        self.stage_bytes = plan.stage_bytes

    def make_fragments(self) -> None:
        super().make_fragments()
        # registers 2h + e of 16 rows and 8 columns: row g + 8h, column 2q + e
        kb, plan, lane = self.kb, self.scaled, self.kb.special("laneid")
        rows, columns = plan.row_scales, plan.column_scales
        row = self.row + (lane >> 2) if rows.each else self.row
        column = self.column + (lane & 3) * 2 if columns.each else self.column
        self.scales = [SideScales(kb, rows, row, plan.scales_start, 16, 8),
                       SideScales(kb, columns, column, plan.scales_start + rows.nbytes, 8, 1)]

    def double_buffered(self) -> bool:
        return not (self.splits.one_or_two or any(tile.mn_major for tile in self.tiles))

    def _at_stage(self) -> None:
        super()._at_stage()
        for side in self.scales: side.move(self.reading)

    def _multiply_step(self, operands: Operands, step: int, after: Operands | None = None) -> None:
        if step == 0: self.read_scales = [side.load() for side in self.scales]
        super()._multiply_step(operands, step, after)

    def promote(self) -> None:
        """Adds a group's sums, times their scales, to those of all groups."""
        kb, (rows, columns), products = self.kb, self.read_scales, dict[tuple[int, int], Value]()
        for row, totals, sums in zip(rows, self.totals[0], self.sums[0], strict=True):
            for column, total, group in zip(columns, totals, sums, strict=True):
                for r in range(4):
                    left, right = row[r // 2 % len(row)], column[r % 2 % len(column)]
                    key = id(left), id(right)
                    if key not in products: products[key] = left * right
                    kb.emit("fma.rn.f32", total[r], group[r], products[key], total[r])


@dataclass
class StageScales:
    """Copies the scales of a group: of rows, then of columns. The first is the last group, where K ends
    within it."""
    plan: ScaledMmaPlan
    rows: ScaleCopies
    columns: ScaleCopies
    place: Value

    def ask(self) -> None:
        """Nothing: what comes ahead is the tiles'."""

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        """Copies the next group's to the stage at a shared address (u32), where the predicate holds."""
        start = stage + self.place
        for side, nbytes in ((self.rows, 0), (self.columns, self.plan.row_scales.nbytes)):
            side.issue(start + nbytes if nbytes else start, when)
            if first and self.plan.ends_within: side.back(self.plan.spec.groups)


@dataclass
class SideScales:
    """A thread's scales of one side, from `first` (u32) of the tile on, `start` bytes after the beginning of
    a stage: of `step` rows or columns each, of which the thread has one and the one `apart` after it."""
    kb: Kernel
    side: Side
    first: Value
    start: int
    step: int
    apart: int

    def __post_init__(self) -> None:
        own = self.kb.reg("u32", self.start)
        if self.side.each: own = own + self.first * 4
        elif not self.side.one: own = own + self.first // self.side.scales.rows * 4
        self.own, self.at = own, self.kb.reg("u32")

    def move(self, stage: Value) -> None:
        """Reads from the stage at a shared address (u32) from now on."""
        self.kb.emit("add.u32", self.at, stage, self.own)

    def load(self) -> Scales:
        """Loads the scales of the stage."""
        side, starts = self.side, range(0, self.side.share, self.step)
        if not side.each:
            read = {index: self._read(index) for index in sorted({side.index(row) for row in starts})}
            return [[read[side.index(row)]] for row in starts]
        if self.apart == 1: return [self.kb.ld("shared", "f32", self.at.at(4 * row), 2) for row in starts]
        return [[self._read(row), self._read(row + self.apart)] for row in starts]

    def _read(self, index: int) -> Value: return self.kb.ld("shared", "f32", self.at.at(4 * index))[0]
