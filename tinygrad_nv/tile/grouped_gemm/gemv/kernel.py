"""Grouped matmuls of few rows a group (spec.py): each matrix that has rows is read once for a tile of them.
For sm_80 and later, any extents.

    wait for the kernel before; the kernel after may begin
    the group and the rows of this CTA, from the offsets (work.py); a CTA without any ends
    as gemm/gemv: weights past L1, activations in shared memory, gathered from the rows of x
    bias, activation, weight; each row to its place

Several CTAs share a sum in a cluster on sm_90a, else through the workspace. Rows of a tile that the group
lacks are zeros where tensor cores multiply them, and stored nowhere.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.gemv.epilogue import GemvEpilogue
from tinygrad_nv.tile.gemm.gemv.kernel import GemvKernel
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.gemv.plan import plan_of
from tinygrad_nv.tile.grouped_gemm.gemv.rows import GroupEpilogue, gather_rows
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedGemv
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.work import most_tiles, tile_of
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.template import GPU


def grouped_gemv(spec: GroupedGemmSpec, schedule: GroupedGemv, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; workspace and flags, where splits meet there; x; w; offsets;
    order, weights, bias, where the spec has them."""
    plan = plan_of(spec, schedule)
    cluster = (1, plan.splits, 1) if plan.is_cluster(gpu.arch) else ()
    kb = Kernel("grouped_gemv", arch=gpu.arch, threads=schedule.threads, cluster=cluster,
                min_ctas=plan.ctas_an_sm)
    _GroupedGemvKernel(kb, plan, spec).write()
    numbers = most_tiles(spec, schedule.rows)
    shared = plan.splits > 1 and not cluster
    tiles = plan.blocks_n * numbers
    nbytes = 4 * tiles * plan.splits * spec.halves * schedule.rows * schedule.block_n if shared else 0
    return GemmKernel(kb.name, kb.ptx(), (plan.blocks_n, plan.splits, numbers), schedule.threads,
                      kb.dynamic_smem, cluster=cluster or (1, 1, 1), workspace_bytes=nbytes,
                      flags=tiles if shared else 0, pdl=kb.hopper)


class _GroupedGemvKernel(GemvKernel):
    """A matmul's kernel whose CTAs have a tile of a group each."""

    def __init__(self, kb: Kernel, plan: GemvPlan, grouped: GroupedGemmSpec) -> None:
        self.grouped = grouped
        super().__init__(kb, plan, swapped=False)

    def declare_params(self, swapped: bool) -> tuple[Value, Value, Value]:
        """x, the group's matrix, and how many rows the tile has."""
        kb, spec = self.kb, self.grouped
        self.finish, self.extras = GroupedEpilogue(kb, spec), []
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        self.tile = tile_of(kb, spec, self.finish.offsets, kb.ctaid.z, self.plan.spec.m)
        matrix = advance(kb, self.finish.matrices["w"], self.tile.group,
                          spec.n * spec.k * spec.dtype.itemsize)
        return self.finish.x, matrix, self.tile.rows

    def indices(self) -> list[Value]: return []

    def wait(self, some: Value) -> None:
        """All have waited."""

    def stage(self, first_k: Value) -> None:
        plan = self.plan
        gather_rows(self.kb, plan, self.finish, self.tile, first_k, plan.span, plan.pitch_bytes,
                 self.smem.address(), self.read)

    def epilogue(self) -> GemvEpilogue:
        return GroupEpilogue(self.finish, self.tile, self.kb, self.plan, self.lanes, self.smem, self.rows,
                             self.batch, self.batch_offset, self.warp_k, self.warp_n, self.out, [],
                            self.shared)
