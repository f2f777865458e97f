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
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.wgmma.kernel import WarpSpecialized
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.load import GroupedLoads, RowGather, RowPlaces
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import GroupedPlan
from tinygrad_nv.tile.grouped_gemm.wgmma.scales import ScaleCopies, ScaledMainLoop
from tinygrad_nv.tile.grouped_gemm.wgmma.store import ColumnStore, GroupedStore, RowStore
from tinygrad_nv.tile.grouped_gemm.wgmma.tile_scheduler import GroupTileScheduler
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
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
