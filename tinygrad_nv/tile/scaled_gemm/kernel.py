"""wgmma's kernel for operands with scales of groups (gemm/wgmma/kernel.py, with another main loop).

    the other warps of the producer's warpgroup:        consumers, for each group of K, a stage of the ring:
        for each tile of this CTA:                          wait until the stage is full
            for each stage of its K:                        for each 64 rows:
                wait until the stage is read                    wgmmas of the group, into sums of their own
                copies of the scales of its                     first rows: read scales of rows and columns
                rows and columns into it                        wait; sums += group's · row's · column's scale

So the 14 bits of an fp8 sum on the tensor core hold for 128 of K, as in gemm/wgmma. The two consumers of a
tile are not in step: one multiplies while the other adds up. Scales come by cp.async, whose arrivals a stage
counts beside TMA's bytes: their rows are not aligned as TMA asks. They are read from shared memory behind the
wgmmas, before the stage is given back.
"""
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from tinygrad_nv.ptx.builder import Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel, build_kernel
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.scaled_gemm.copy import ScaleCopies
from tinygrad_nv.tile.scaled_gemm.plan import LOADERS, ScalePlan
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledWgmma
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec
from tinygrad_nv.tile.template import GPU


def scaled_wgmma(spec: ScaledGemmSpec, schedule: ScaledWgmma, gpu: GPU) -> GemmKernel:
    """The kernel of a matmul with scales, by a legal schedule."""
    return build_kernel("scaled_wgmma", spec, schedule, gpu, _ScaledKernel)


class _ScaledKernel(WgmmaKernel):
    OPERANDS = ("a", "b", "a_scale", "b_scale")
    LOADERS = LOADERS

    def make_main_loop(self, pointers: Mapping[str, Value], rows: Value | int) -> MainLoop:
        kb, plan = self.kb, self.plan
        self.scales = ScalePlan.of(plan)
        self.stages = kb.shared("scales", self.scales.nbytes * plan.schedule.depth, align=16)
        self.pointers = [pointers[f"{name}_scale"] for name in ("ba" if plan.schedule.swap else "ab")]
        self.rows = rows
        return _ScaledMainLoop(self, self.scales, self.stages.address())

    def load_beside(self) -> None:
        """Copies of scales, by the warps beside the one that has TMA's."""
        kb, scales, spec = self.kb, self.scales, self.plan.spec
        assert isinstance(spec, ScaledGemmSpec)
        at = self.ring.cursor(producer=True)
        kb.wait_for_previous_grid()
        thread = kb.tid.x - (WARPGROUP * self.plan.consumers + 32)
        start = self.stages.address() + thread * 4
        sides = [ScaleCopies(kb, one, pointer, thread, LOADERS, count, extent)
                 for one, pointer, count, extent in (
                     (spec.a_scale, self.pointers[0], scales.rows, self.rows),
                     (spec.b_scale, self.pointers[1], scales.columns, spec.n))]
        with self.scheduler.work_tiles() as work_tile:
            corner = self.scheduler.corner(work_tile.number)
            for side, first in zip(sides, (corner.m, corner.n), strict=True):
                side.begin(first, work_tile.first)
            with kb.loop(0, work_tile.count):
                full = self.ring.vacant(at)
                stage = start + at.stage * scales.nbytes
                sides[0].issue(stage)
                sides[1].issue(stage + scales.rows * 4)
                kb.emit("cp.async.mbarrier.arrive.noinc.shared.b64", full)
                at.advance()


class ScaledSums(MainLoop):
    """Main loop whose sums of a group of K, a stage, are multiplied with scales and added in float32. The
    scales are read behind the group's first wgmmas."""

    def _accumulate_promoted(self, iterations: Number) -> None:
        kb = self.kb
        for row in self.sums:
            for each in row: each.set(0.0)
        with kb.loop(0, iterations, kind="u32"):
            self.ring.wait(self.at)
            for i, row in enumerate(self.sums):
                kb.wgmma_fence()
                self._stage({i: self.partial}, False, 0, self.plan.steps)
                kb.wgmma_commit()
                if i == 0: scales = self._scales()
                kb.wgmma_wait(0)
                if i + 1 == len(self.sums): self.ring.release(self.empty_barriers, self.at.stage, self.mine)
                for j, (each, more) in enumerate(zip(row, self.partial, strict=True)):
                    kb.emit("fma.rn.f32", each, more, scales[i][j], each)
            self.at.advance()
        self._arrive_issued()

    @abstractmethod
    def _scales(self) -> list[list[Value]]:
        """Returns the scale of each sum of a group."""


class _ScaledMainLoop(ScaledSums):
    """The main loop of one consumer warpgroup, with scales of A's rows and B's columns."""

    def __init__(self, kernel: WgmmaKernel, scales: ScalePlan, stages: Value) -> None:
        super().__init__(kernel.kb, kernel.plan, kernel.ring, kernel.ordered, kernel.loads)
        self.scales, self.stages = scales, stages

    def begin(self) -> None:
        super().begin()
        kb, plan, scales = self.kb, self.plan, self.scales
        # registers 4j … 4j + 3 of 64 rows: rows r and r + 8, columns 8j + c and 8j + c + 1
        lane, row = kb.special("laneid"), kb.reg("u32", 0)
        if plan.readers > 1: row = self.consumer * plan.rows
        if scales.each_row: row = row + (kb.tid.x % WARPGROUP >> 5) * 16 + (lane >> 2)
        elif scales.rows > 1: row = row // scales.spec.a_scale.rows
        self.row = self.stages + (row * 4 if scales.rows > 1 else 0)
        self.column = self.stages + scales.rows * 4
        if scales.each_column: self.column = self.column + (lane & 3) * 8

    def _scales(self) -> list[list[Value]]:
        """The scale of each sum of a group: that of its row times that of its column."""
        start, scales, eights = self.at.stage * self.scales.nbytes, self.scales, len(self.partial) // 4
        left, right = ([self._read(place + start, offset) for offset in offsets] for place, offsets in (
            (self.row, scales.row_offsets), (self.column, scales.column_offsets)))
        halves, each = len(left) // len(self.sums), len(right) // eights
        products = [[row * column for column in right] for row in left]
        def place(j: int) -> int: return j // 4 * each + j % each if each else j // 4 * len(right) // eights
        return [[products[i * halves + j % 4 // 2 * (halves - 1)][place(j)] for j in range(4 * eights)]
                for i in range(len(self.sums))]

    def _read(self, place: Value, offset: int) -> Value:
        made = self.kb.reg("f32")
        self.kb.emit("ld.shared.f32", made, place.at(4 * offset))
        return made
