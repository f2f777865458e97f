"""Grouped matmuls with quantised matrices of few rows a group (spec.py): each matrix that has rows is read
once for a tile of them. For sm_80 and later, any extents.

    wait for the kernel before; the kernel after may begin
    the group and the rows of this CTA, from the offsets (grouped_gemm/work.py); a CTA without any ends
    as quant_gemm/gemv: codes and factors of the group's matrices past L1, operands made in registers;
        activations in shared memory, gathered from the rows of x
    bias, activation, weight; each row to its place

The first codes are on their way before activations are gathered. Gate and up are matrices of their own, which
each begin with a tile.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.gemv.epilogue import GemvEpilogue
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.gemv.kernel import GroupEpilogue, gather_rows
from tinygrad_nv.tile.grouped_gemm.work import most_tiles, tile_of
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.quant_gemm.gemv.kernel import QuantGemvKernel
from tinygrad_nv.tile.quant_gemm.gemv.plan import QuantGemvPlan
from tinygrad_nv.tile.quant_grouped.gemv.plan import ctas_an_sm, plan_of
from tinygrad_nv.tile.quant_grouped.matrices import of_group
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU


def quant_grouped_gemv(spec: QuantGroupedSpec, schedule: QuantGroupedGemv, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; workspace and flags, where splits meet there; x; the stack's
    buffers; offsets; order, weights, bias, where the spec has them."""
    plan = plan_of(spec, schedule)
    cluster = (1, plan.splits, 1) if plan.is_cluster(gpu.arch) else ()
    kb = Kernel("quant_grouped_gemv", arch=gpu.arch, threads=plan.threads, cluster=cluster,
                min_ctas=ctas_an_sm(plan))
    _QuantGroupedGemv(kb, plan, spec).write()
    numbers = most_tiles(spec.grouped, schedule.rows)
    shared = plan.splits > 1 and not cluster
    tiles = plan.blocks_n * numbers
    nbytes = 4 * tiles * plan.splits * plan.spec.parts * schedule.rows * plan.block_n if shared else 0
    return GemmKernel(kb.name, kb.ptx(), (plan.blocks_n, plan.splits, numbers), plan.threads, kb.dynamic_smem,
                      cluster=cluster or (1, 1, 1), workspace_bytes=nbytes, flags=tiles if shared else 0,
                      pdl=kb.hopper)


class _QuantGroupedGemv(QuantGemvKernel):
    """A matmul's kernel whose CTAs have a tile of a group each."""

    def __init__(self, kb: Kernel, plan: QuantGemvPlan, whole: QuantGroupedSpec) -> None:
        self.whole = whole
        super().__init__(kb, plan)

    def declare_params(self) -> tuple[Value, dict[str, Value], Value]:
        kb, spec = self.kb, self.whole
        self.finish, self.extras = GroupedEpilogue(kb, spec.grouped, spec.buffers), []
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        self.tile = tile_of(kb, spec.grouped, self.finish.offsets, kb.ctaid.z, self.spec.m)
        pointers = of_group(kb, spec, self.finish.matrices, self.tile.group)
        return self.finish.x, pointers, self.tile.rows

    def wait(self) -> None:
        """All have waited."""

    def stage(self, first: Value) -> None:
        plan = self.plan
        gather_rows(self.kb, plan, self.finish, self.tile, first, plan.span, plan.pitch_bytes,
                 self.smem.address(), self.read)

    def epilogue(self) -> GemvEpilogue:
        kb = self.kb
        return GroupEpilogue(self.finish, self.tile, kb, self.plan, self, self.smem, self.rows, [],
                             lambda strides, offset: kb.reg("u64", offset), self.warp, kb.reg("u32", 0),
                             self.out, [], self.shared)
