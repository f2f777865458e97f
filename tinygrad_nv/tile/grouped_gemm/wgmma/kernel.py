"""Rows times the matrices of their groups, with wgmma: gemm/wgmma's kernel over tiles of groups.

    one warp: counts the tiles of all groups, before all begin

    producer, one thread:                      the other warps of its warpgroup, where rows are gathered:
        for each tile of this CTA:                 for each tile: places of its rows
            for each stage of its K:                   for each stage of its K:
                wait until the stage is read               wait until the stage is read
                boxes of the matrix (and of rows)          cp.async of the rows' 128 bytes, which arrive too

    consumers, a warpgroup each: the main loop of gemm/wgmma; then activation, weights, rows to their places

No extent depends on how rows are routed: the grid is as many CTAs as run at once, and a tile of rows ends
where its group does.

Operands of 8 bits have scales of groups of K: a stage has a float32 scale for each row of its tile, and
behind them one for gate and one for up, or one for the matrix. The producer's other warps copy them
(cp.async), beside gathered rows. Sums of a group are multiplied with both scales and added in float32, as in
scaled_gemm/kernel.py; scales are read behind the group's first wgmmas.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.wgmma.kernel import WarpSpecialized
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop, OperandStages
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GROUP, GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.load import GroupedLoads, RowGather, RowPlaces
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import GroupedPlan
from tinygrad_nv.tile.grouped_gemm.wgmma.store import ColumnStore, GroupedStore, RowStore
from tinygrad_nv.tile.grouped_gemm.wgmma.tile_scheduler import GroupTile, GroupTileScheduler
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
from tinygrad_nv.tile.scaled_gemm.kernel import ScaledSums
from tinygrad_nv.tile.template import GPU


def grouped_wgmma(spec: GroupedGemmSpec, schedule: GroupedWgmma, gpu: GPU) -> TileKernel:
    """The kernel of a grouped matmul, by a legal schedule. Pointers: out, x, w, their scales where
    operands have them, offsets, and those there are of order, weights and bias."""
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return GroupedKernel(kb, GroupedPlan.of(spec, schedule)).emit_kernel(gpu)


class GroupedKernel(WarpSpecialized):
    """The kernel as it is written."""
    plan: GroupedPlan

    def __init__(self, kb: Kernel, plan: GroupedPlan) -> None:
        self.kb, self.plan, spec = kb, plan, plan.grouped
        names = ["out", "x", *self.matrices, "offsets", *["order"] * spec.has_order,
                 *["weights"] * spec.weighted, *["bias"] * spec.biased]
        self.pointers = {name: kb.pointer(name) for name in names}
        self.scheduler = GroupTileScheduler(kb, plan, self.pointers["offsets"])
        self.loads = self.make_loads()
        self.LOADERS = plan.loaders
        self.ring = Pipeline(kb, plan.schedule.depth, plan.copy_bytes, WARPGROUP // 32 * plan.readers,
                             loaders=self.LOADERS)
        self.ordered = OrderedBarrier(kb, plan.consumers, WARPGROUP // 32) if plan.pingpong else None
        self.scales = kb.shared("scales", plan.scale_bytes * plan.schedule.depth) if spec.scaled else None
        self.main_loop = self.make_main_loop()
        kind: type[GroupedStore] = ColumnStore if plan.schedule.swap else RowStore
        self.epilogue = kind(kb, plan, self.pointers)

    @property
    def matrices(self) -> Sequence[str]:
        """Names of the pointers between x and offsets."""
        return ["w", *["scale_x", "scale_w"] * self.plan.grouped.scaled]

    def make_loads(self) -> GroupedLoads:
        """The producer's copies."""
        return GroupedLoads(self.kb, self.plan)

    def make_main_loop(self) -> MainLoop:
        """Returns the main loop of the consumers."""
        if self.scales is None: return MainLoop(self.kb, self.plan, self.ring, self.ordered, self.loads)
        return ScaledMainLoop(self.kb, self.plan, self.ring, self.ordered, self.loads, self.scales)

    def emit_kernel(self, gpu: GPU) -> TileKernel:
        """The kernel, whole."""
        kb, plan = self.kb, self.plan
        self.write()
        ctas = min(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, plan.most_tiles)
        return TileKernel(kb.name, kb.ptx(), (ctas, 1, 1), plan.schedule.threads, kb.dynamic_smem,
                          maps=tuple(self.loads.maps), pdl=True)

    @property
    def tensor_maps(self) -> list[Value]: return self.loads.tensor_maps

    def prepare(self) -> None:
        """The producer's last warp counts: it has nothing else to do yet."""
        with self.kb.if_(self.kb.tid.x >= self.plan.schedule.threads - 32):
            self.kb.wait_for_previous_grid()
            self.scheduler.count()

    def produce(self) -> None:
        kb, at = self.kb, self.ring.cursor(producer=True)
        kb.wait_for_previous_grid()
        one = kb.elect()
        with self.scheduler.work_tiles() as tile, kb.if_(one):
            self.loads.begin(tile)
            with kb.loop(0, self.plan.iterations):
                full = self.ring.acquire(at)
                self.loads.issue(at.stage, full)
                at.advance()
        with kb.if_(one): kb.launch_dependents()

    def load_beside(self) -> None:
        kb, at = self.kb, self.ring.cursor(producer=True)
        kb.wait_for_previous_grid()
        copies = self.copies()
        with self.scheduler.work_tiles() as tile:
            for each in copies: each.begin(tile)
            with kb.loop(0, self.plan.iterations):
                full = self.ring.vacant(at)
                for each in copies: each.issue(at.stage)
                kb.emit("cp.async.mbarrier.arrive.noinc.shared.b64", full)
                at.advance()

    def copies(self) -> list[RowGather | ScaleCopies]:
        """Returns the copies of the warps beside TMA's."""
        kb, plan, given = self.kb, self.plan, self.pointers
        places = RowPlaces(kb, plan, given.get("order"))
        made: list[RowGather | ScaleCopies] = []
        if plan.gathers_rows: made.append(RowGather(kb, plan, given["x"], places, self.loads.row_start))
        if self.scales is not None:
            made.append(ScaleCopies(kb, plan, given["scale_x"], given["scale_w"], places, self.scales))
        return made

    def consume(self) -> None:
        plan, main_loop = self.plan, self.main_loop
        with self.scheduler.work_tiles(main_loop.consumer if plan.pingpong else None) as tile:
            self.epilogue.store(tile, main_loop.consumer, main_loop.sum(plan.iterations))
            if plan.pingpong: main_loop.at.skip((plan.consumers - 1) * plan.iterations)


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


class ScaledMainLoop(ScaledSums):
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
