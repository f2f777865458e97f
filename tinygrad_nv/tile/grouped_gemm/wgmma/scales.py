"""Operands of 8 bits with scales of groups of K: copies of the scales, and the main loop that has them.

Protocol: a stage has a float32 scale for each row of its tile, and behind them one for gate and one for up,
or one for the matrix. The producer's other warps copy them (cp.async), beside gathered rows. Sums of a group
are multiplied with both scales and added in float32, as in scaled_gemm/kernel.py; scales are read behind the
group's first wgmmas.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop, OperandStages
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.grouped_gemm.spec import GROUP, ScaledGroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.load import RowPlaces
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import GroupedPlan
from tinygrad_nv.tile.grouped_gemm.wgmma.tile_scheduler import GroupTile
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline


class ScaleCopies:
    """Copies of scales by the plan's `loaders`."""

    def __init__(self, kb: Kernel, plan: GroupedPlan, scale_x: Value, scale_w: Value, places: RowPlaces,
                 stages: Shared) -> None:
        self.kb, self.plan, self.scale_x, self.scale_w, self.rows = kb, plan, scale_x, scale_w, places
        self.thread, threads = kb.tid.x - (plan.schedule.threads - plan.loaders), plan.loaders
        self.stages = stages.address() + self.thread * 4
        self.passes = -(-plan.tokens // threads)
        self.at = kb.regs("u64", self.passes)
        self.mine = [None if (i + 1) * threads <= plan.tokens else self.thread < plan.tokens - i * threads
                     for i in range(self.passes)]
        self.at_matrix, self.has_half = kb.reg("u64"), self.thread < plan.grouped.halves

    def begin(self, tile: GroupTile) -> None:
        """The next stages are of a tile."""
        kb, spec = self.kb, self.plan.grouped
        assert isinstance(spec, ScaledGroupedGemmSpec)
        for i, at in enumerate(self.at):
            row = self.rows.source(tile, tile.row + (self.thread + i * self.plan.loaders))
            at.set(advance(kb, self.scale_x, row, spec.k_groups * 4))
        first = tile.group * spec.n_groups + tile.column // GROUP
        half = kb.reg("u32")
        kb.emit("min.u32", half, self.thread, spec.halves - 1)
        first = first + half * (spec.columns // GROUP)
        self.at_matrix.set(advance(kb, self.scale_w, first, spec.k_groups * 4))

    def issue(self, stage: Value) -> None:
        """Issues the copies of a group, into a stage; the group after it is next."""
        kb, plan = self.kb, self.plan
        place = self.stages + stage * plan.scale_bytes
        for i, (at, mine) in enumerate(zip(self.at, self.mine, strict=True)):
            kb.emit("cp.async.ca.shared.global", place.at(4 * plan.loaders * i), at.at(), 4, guard=mine)
            at += 4
        kb.emit("cp.async.ca.shared.global", place.at(4 * plan.tokens), self.at_matrix.at(), 4,
                guard=self.has_half)
        self.at_matrix += 4


class ScaledMainLoop(MainLoop):
    """The main loop of one consumer warpgroup."""

    def __init__(self, kb: Kernel, plan: GroupedPlan, ring: Pipeline, ordered: OrderedBarrier | None,
                 loads: OperandStages, stages: Shared) -> None:
        super().__init__(kb, plan, ring, ordered, loads)
        self.grouped, self.stages = plan, stages

    def begin(self) -> None:
        super().begin()
        kb, plan, lane = self.kb, self.grouped, self.kb.special("laneid")
        if plan.schedule.swap: self.row = self.stages.address() + (lane & 3) * 8
        else:
            row = (kb.tid.x % WARPGROUP >> 5) * 16 + (lane >> 2)
            if plan.readers > 1: row = row + self.consumer * plan.rows
            self.row = self.stages.address() + row * 4
        self.matrix = self.stages.address() + plan.tokens * 4

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

    def _scales(self) -> list[list[Value]]:
        """The scale of each sum of a group: that of its row times that of its half of the matrix."""
        kb, plan, count = self.kb, self.grouped, len(self.partial)
        start, halves = self.at.stage * plan.scale_bytes, plan.grouped.halves
        matrix, rows = self.matrix + start, self.row + start
        of_half = [kb.ld("shared", "f32", matrix.at(4 * half))[0] for half in range(halves)]
        each = range(len(self.sums))
        if plan.schedule.swap:      # column 8j + 2q + i is row 8j + 2q + i of x
            pairs = [kb.ld("shared", "f32", rows.at(32 * j), 2) for j in range(count // 4)]
            products = [[[one * factor for one in pair] for pair in pairs] for factor in of_half]
            own = [products[i * halves // len(self.sums)] for i in each]
            return [[pairs[j // 4][j % 2] for j in range(count)] for pairs in own]
        fine = [[kb.ld("shared", "f32", rows.at(4 * (64 * i + 8 * h)))[0] for h in range(2)] for i in each]
        made = [[[one * factor for factor in of_half] for one in pair] for pair in fine]
        return [[made[i][j % 4 // 2][j * halves // count] for j in range(count)] for i in each]
