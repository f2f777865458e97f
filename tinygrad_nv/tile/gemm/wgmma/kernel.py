"""Matmuls with wgmma and TMA: one warpgroup loads, the others multiply. For sm_90a.

    producer, one thread:                      consumers, a warpgroup each:
        for each tile of this CTA:                 for each tile (or each of my turns):
            for each stage of its K:                   for each stage of its K:
                wait until the stage is read               wait until the stage is full
                copies of A and B into it                  products of my rows of A with B
                                                           the stage before is read
                                                       run the epilogue, store what lies inside

Consumers share each tile's rows, or take turns at whole tiles (ping-pong), so that one multiplies while the
other stores. CTAs are persistent: as many as there are multiprocessors, each with tiles far apart
(tile_scheduler.py), so that the producer runs ahead into the next tile while the consumers store. The CTAs of
a cluster bring each a part of what they share, to all of them (multicast). The ring is tile/pipeline.py's.
Where several CTAs have parts of one tile's K, their sums are reduced before they are stored (store.py).

It is launched with PDL: the thread that loads and the consumers, which access global memory, wait for the
previous kernel once the barriers are made. The kernel after may begin once all CTAs' last copies are on their
way.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop
from tinygrad_nv.tile.gemm.wgmma.plan import REGISTERS, WARPGROUP, WgmmaPlan
from tinygrad_nv.tile.gemm.wgmma.store import (
    ClusterReduction,
    StreamKReduction,
    TileReduction,
    WgmmaEpilogue,
    cluster_together,
)
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import PersistentTileScheduler
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
from tinygrad_nv.tile.template import GPU


def gemm_wgmma(spec: GemmSpec, schedule: Wgmma, gpu: GPU) -> GemmKernel:
    """The kernel of a matmul, by a legal schedule, with as many CTAs as the GPU runs at once."""
    return build_kernel("gemm_wgmma", spec, schedule, gpu, WgmmaKernel)


def build_kernel(name: str, spec: GemmSpec, schedule: Wgmma, gpu: GPU, kind: type[WgmmaKernel]) -> GemmKernel:
    """A kernel of a kind."""
    plan = WgmmaPlan.of(spec, schedule)
    ctas = plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, gpu.clusters)
    kb = Kernel(name, arch=gpu.arch, threads=schedule.threads, min_ctas=1,
               cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else ())
    return kind(kb, plan, ctas).emit_kernel()


class WarpSpecialized:
    """The roles of a kernel's warpgroups, and what comes before them. `LOADERS` threads of the producer's
    warpgroup do what `load_beside` says."""
    LOADERS = 0
    kb: Kernel
    plan: WgmmaPlan
    ring: Pipeline
    ordered: OrderedBarrier | None
    main_loop: MainLoop

    @property
    def tensor_maps(self) -> list[Value]:
        """Maps to be fetched at the beginning."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepares what comes before the barrier that all threads meet at first."""

    def produce(self) -> None:
        """Fills stages, tile after tile: the producer's first warp."""
        raise NotImplementedError

    def load_beside(self) -> None:
        """Loads what the warps beside the producer's copy."""

    def consume(self) -> None:
        """Multiplies and stores, tile after tile; in ping-pong every second (or third) one."""
        raise NotImplementedError

    def write(self) -> None:
        """The whole text."""
        kb, plan = self.kb, self.plan
        with kb.comment("one thread makes the barriers, and has the tensor maps fetched"):
            with kb.if_(kb.tid.x == 0):
                for each in self.tensor_maps: kb.emit("prefetch.tensormap", each.at())
                self.ring.init()
                if self.ordered is not None: self.ordered.init()
                kb.fence_mbarrier_init()
            self.prepare()
            self.together()
        producer = kb.tid.x >= WARPGROUP * plan.consumers
        fewer, more = REGISTERS[plan.consumers]
        with kb.if_(producer), kb.comment("producer: the last warpgroup"):
            if fewer: kb.setmaxnreg(fewer, more=False)
            with kb.if_(kb.tid.x < WARPGROUP * plan.consumers + 32): self.produce()
            if self.LOADERS:
                with kb.if_(kb.tid.x >= plan.schedule.threads - self.LOADERS): self.load_beside()
            if plan.schedule.splits > 1: cluster_together(kb)
        with kb.else_(), kb.comment("consumers"):
            if more: kb.setmaxnreg(more, more=True)
            self.main_loop.begin()
            kb.wait_for_previous_grid()
            self.consume()
        if plan.cluster > 1:
            with kb.comment("no CTA exits while others may still write to its shared memory"): self.together()

    def together(self) -> None:
        """A barrier of the CTA, or of the cluster."""
        if self.plan.cluster == 1: self.kb.sync()
        else: cluster_together(self.kb)


class WgmmaKernel(WarpSpecialized):
    """The kernel as it is written: parameters and shared memory, then the two roles. `OPERANDS` are its
    pointers between scratch and the epilogue's; maps read the first two."""
    OPERANDS: tuple[str, ...] = ("a", "b")

    def __init__(self, kb: Kernel, plan: WgmmaPlan, ctas: int) -> None:
        self.kb, self.plan, self.ctas, spec = kb, plan, ctas, plan.spec
        out = kb.pointer("out")
        shared = [kb.pointer(name) for name in ("workspace", "flags")] if plan.schedule.stream else []
        operands = {name: kb.pointer(name) for name in self.OPERANDS}
        extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        rows: Value | int = kb.param("m", "u32") if spec.symbolic else spec.m
        self.scheduler = self.make_scheduler(operands, rows)
        self.loads = self.make_loads(1 + len(shared))
        self.ring = Pipeline(kb, plan.schedule.depth, plan.copy_bytes, WARPGROUP // 32 * plan.readers,
                         plan.peers, loaders=self.LOADERS)
        self.ordered = OrderedBarrier(kb, plan.consumers, WARPGROUP // 32) if plan.pingpong else None
        self.main_loop = self.make_main_loop(operands, rows)
        self.epilogue = WgmmaEpilogue(kb, plan, out, extras, rows)
        self.maps = (*self.loads.maps, *self.epilogue.maps)
        ends = self.main_loop, self.scheduler, self.epilogue
        self.reduction: TileReduction
        if shared: self.reduction = StreamKReduction(*ends, shared)
        else: self.reduction = (ClusterReduction if plan.schedule.splits > 1 else TileReduction)(*ends)

    def make_scheduler(self, pointers: Mapping[str, Value], rows: Value | int) -> PersistentTileScheduler:
        """The work tiles."""
        return PersistentTileScheduler(self.kb, self.plan, rows, self.ctas)

    def make_loads(self, first_pointer: int) -> GemmLoads:
        """The producer's copies."""
        return GemmLoads(self.kb, self.plan, first_pointer)

    def make_main_loop(self, pointers: Mapping[str, Value], rows: Value | int) -> MainLoop:
        """Returns the main loop of the consumers."""
        return MainLoop(self.kb, self.plan, self.ring, self.ordered, self.loads)

    @property
    def tensor_maps(self) -> list[Value]: return [*self.loads.tensor_maps, *self.epilogue.tensor_maps]

    def emit_kernel(self) -> GemmKernel:
        """The kernel, whole."""
        kb, plan, s, reduction = self.kb, self.plan, self.plan.schedule, self.reduction
        self.write()
        # a symbolic grid is that of the most rows, unless each cluster has one tile, which it must have
        each = self.ctas // plan.extents[0] if plan.spec.symbolic and s.splits > 1 else 0
        return GemmKernel(kb.name, kb.ptx(), (self.ctas, 1, 1), s.threads, kb.dynamic_smem,
                          cluster=(plan.cluster, 1, 1), maps=self.maps,
                          workspace_bytes=reduction.workspace_bytes, flags=reduction.flags,
                          rows_of_cta=s.block_m if each else 0, ctas_of_rows=each or 1, pdl=True)

    def produce(self) -> None:
        kb = self.kb
        with kb.if_(kb.elect()):
            at = self.ring.cursor(producer=True)
            kb.wait_for_previous_grid()
            with self.scheduler.work_tiles() as work_tile:
                self.loads.begin(self.scheduler.corner(work_tile.number), work_tile.first)
                with kb.loop(0, work_tile.count):
                    full = self.ring.acquire(at)
                    self.loads.issue(at.stage, full)
                    at.advance()
            kb.launch_dependents()

    def consume(self) -> None:
        plan, main_loop = self.plan, self.main_loop
        with self.scheduler.work_tiles(main_loop.consumer if plan.pingpong else None) as work_tile:
            self.reduction.finalize(work_tile, main_loop.sum(work_tile.count))
            if plan.pingpong: main_loop.at.skip((plan.consumers - 1) * plan.iterations)
        self.epilogue.to.finish()
