"""Sums of outer products of the rows of groups with wgmma (outer.py): gemm/wgmma's kernel, over as many rows
as a group has. For sm_90a.

    producer, one thread:                        two warps beside it:
        for each tile of this CTA:                   for each tile: the rows of its group
            arrive at the first stage                    the first stage: what is left of rows by block_k,
            for each further stage:                          zeros beyond
                boxes of what lies in order              each further stage: what an order names

    consumers: the main loop and the epilogue of gemm/wgmma, of yᵀ and x, which both lie along their columns

A group without rows has one stage of zeros. Sums do not depend on how rows are dealt to CTAs: one CTA has a
tile's.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import PersistentTileScheduler
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.outer_wgmma.load import OuterLoads, OuterTileScheduler, RowCopy
from tinygrad_nv.tile.grouped_gemm.outer_wgmma.plan import LOADERS, OuterPlan
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterWgmma
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.pipeline import PipelineState
from tinygrad_nv.tile.template import GPU


def grouped_outer_wgmma(spec: GroupedOuterSpec, schedule: GroupedOuterWgmma, gpu: GPU) -> GemmKernel:
    """The kernel. Pointers in this order: out; y; x; offsets; order, where the spec has one."""
    plan = OuterPlan.for_groups(spec, schedule)
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return _OuterKernel(kb, plan, plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count)).emit_kernel()


class _OuterKernel(WgmmaKernel):
    LOADERS = LOADERS
    plan: OuterPlan
    scheduler: OuterTileScheduler
    loads: OuterLoads

    def __init__(self, kb: Kernel, plan: OuterPlan, ctas: int) -> None:
        self.OPERANDS = ("y", "x", "offsets", *["order"] * plan.outer.has_order)
        super().__init__(kb, plan, ctas)

    def make_scheduler(self, pointers: Mapping[str, Value], rows: Value | int) -> PersistentTileScheduler:
        self.pointers = pointers
        return OuterTileScheduler(self.kb, self.plan, self.ctas, pointers["offsets"])

    def make_loads(self, first_pointer: int) -> OuterLoads:
        return OuterLoads(self.kb, self.plan, first_pointer)

    def produce(self) -> None:
        kb = self.kb
        with kb.if_(kb.elect()):
            at = self.ring.cursor(producer=True)
            kb.wait_for_previous_grid()
            with self.scheduler.work_tiles() as work_tile:
                self.loads.place(self.scheduler.corner(work_tile.number), self.scheduler.rows)
                kb.mbarrier_arrive(self.ring.vacant(at))
                at.advance()
                with kb.loop(1, work_tile.count, kind="u32"):
                    full = self.ring.acquire(at)
                    self.loads.issue(at.stage, full)
                    at.advance()
            kb.launch_dependents()

    def load_beside(self) -> None:
        kb, at = self.kb, self.ring.cursor(producer=True)
        kb.wait_for_previous_grid()
        copies = self._copies()
        with self.scheduler.work_tiles() as work_tile:
            corner = self.scheduler.corner(work_tile.number)
            for each in copies: each.begin(self.scheduler.rows)
            full = self.ring.vacant(at)
            for each, column in zip(copies, (corner.m, corner.n), strict=True): each.first(at.stage, column)
            self._arrive(at, full)
            with kb.loop(1, work_tile.count, kind="u32"):
                full = self.ring.vacant(at)
                for each in copies:
                    if each.gather: each.issue(at.stage)
                self._arrive(at, full)

    def _copies(self) -> list[RowCopy]:
        """Returns the copies of y and x."""
        kb, plan, outer, given = self.kb, self.plan, self.plan.outer, self.pointers
        thread = kb.tid.x - (plan.schedule.threads - LOADERS)
        sides = zip((plan.a, plan.b), ("y", "x"), self.loads.starts, (outer.n, outer.k), plan.gather_slots,
                    strict=True)
        return [RowCopy(kb, tile, given[name], start, columns, gather, given.get("order"), thread)
                for tile, name, start, columns, gather in sides]

    def _arrive(self, at: PipelineState, full: MemoryOperand) -> None:
        """At the barrier of a stage, once this thread's copies are there."""
        self.kb.emit("cp.async.mbarrier.arrive.noinc.shared.b64", full)
        at.advance()
