"""Grouped matmuls with quantised matrices by mma.sync (spec.py): the ring of quant_gemm/mma, whose tiles of
rows belong to a group each. For sm_80 and later, any extents.

    wait for the kernel before
    the group and the rows of this CTA, from the offsets (grouped_gemm/work.py); a CTA without any ends
    as quant_gemm/mma: a stage has rows of x, copied from where they lie, and codes and factors of the group's
        matrices; rows that the group lacks are zeros
    bias, activation, weight; each row to its place (grouped_gemm/mma/kernel.py)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.mma.kernel import GatheredCopy, store_rows
from tinygrad_nv.tile.grouped_gemm.work import tile_of
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TailFirst, width_of
from tinygrad_nv.tile.quant_gemm.mma.kernel import MatrixCopy, QuantMmaKernel
from tinygrad_nv.tile.quant_gemm.mma.plan import QuantMmaPlan
from tinygrad_nv.tile.quant_grouped.matrices import of_group, tiles
from tinygrad_nv.tile.quant_grouped.mma.plan import plan_of
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedMma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU


def quant_grouped_mma(spec: QuantGroupedSpec, schedule: QuantGroupedMma, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; x; the stack's buffers; offsets; order, weights, bias, where
    the spec has them."""
    kb = Kernel("quant_grouped_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return _QuantGroupedMma(kb, plan_of(spec, schedule), spec).emit_kernel()


class _QuantGroupedMma(QuantMmaKernel):
    """A matmul's kernel whose tiles belong to a group each."""

    def __init__(self, kb: Kernel, plan: QuantMmaPlan, whole: QuantGroupedSpec) -> None:
        self.whole = whole
        super().__init__(kb, plan)

    def declare_params(self) -> Sequence[Value]:
        self.finish = GroupedEpilogue(self.kb, self.whole.grouped, self.whole.buffers)
        return self.finish.x, self.finish.x

    def make_copies(self, a: Value, b: Value) -> None:
        """The copies of rows of x, then of each half of the group's matrices."""
        kb, spec, s, plan = self.kb, self.spec, self.schedule, self.quant
        if kb.hopper: kb.wait_for_previous_grid()
        self.tile = tile_of(kb, self.whole.grouped, self.finish.offsets, self.scheduler.m, s.block_m)
        residue, none = spec.k % s.block_k or s.block_k, kb.reg("u32", 0)
        rows = _GatheredTailFirst(kb, spec.a, a, none, self.tile.rows, residue, width_of(spec.a, 1, residue),
                                  s.block_m, s.block_k, 0, self.finish, self.tile, spec.k)
        self.starts = [plan.activation_bytes + half * plan.boxes[-1].end for half in range(spec.parts)]
        self.tiles = [rows]
        self.copies = [rows, *(MatrixCopy(
            kb, plan, of_group(kb, self.whole, self.finish.matrices, self.tile.group, half),
            self.first_n // TILE, tiles(self.whole), none, start) for half, start in enumerate(self.starts))]
        self.stage_bytes = plan.stage_bytes

    def store(self) -> None: store_rows(self, self.finish, self.tile)


@dataclass
class _GatheredTailFirst(TailFirst, GatheredCopy):
    """Copies rows of x that the rows of a tile of a group are, the last columns first."""
