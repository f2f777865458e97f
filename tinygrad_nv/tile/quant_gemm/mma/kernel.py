"""Matmuls with a quantised matrix by mma.sync: that of gemm/mma/kernel.py, whose operand B comes from codes.

A stage has a tile of activations, and codes and factors of the matrix. A warp reads its codes once for all
its rows, 16 bytes a lane, and makes operands of them between the mmas of the step before. Elements are
rounded to 16 bits once they are multiplied with their scale, those of whole rows, too.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.fragments import Fragments
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TailFirst, width_of
from tinygrad_nv.tile.quant_gemm.mma.copy import MatrixCopy, MatrixFragments
from tinygrad_nv.tile.quant_gemm.mma.plan import QuantMmaPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantMma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU


def quant_mma(spec: QuantGemmSpec, schedule: QuantMma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    kb = Kernel("quant_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return QuantMmaKernel(kb, QuantMmaPlan.of(spec, schedule)).emit_kernel()


class QuantMmaKernel(MmaKernel):
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: QuantMmaPlan) -> None:
        self.quant = plan
        super().__init__(kb, plan)

    def declare_params(self) -> Sequence[Value]:
        a = self.kb.pointer("a")
        self.pointers = {name: self.kb.pointer(name) for name in self.quant.quant.buffers}
        return a, a

    def make_copies(self, a: Value, b: Value) -> None:
        kb, spec, s, plan = self.kb, self.spec, self.schedule, self.quant
        extent = self.rows if spec.symbolic else spec.m
        residue = spec.k % s.block_k or s.block_k
        tile = TailFirst(kb, spec.a, self._place(spec.a, a), self.first_m, extent, residue,
                         width_of(spec.a, 1 if spec.symbolic else spec.m, residue), s.block_m, s.block_k, 0,
                         spec.k)
        first_k = self.splits.first_k if self.splits.first_k is not None else kb.reg("u32", 0)
        self.starts = [plan.activation_bytes + part * plan.boxes[-1].end for part in range(spec.parts)]
        self.tiles = [tile]
        first = [self.first_n // TILE + part * (spec.n // TILE) for part in range(spec.parts)]
        tiles = plan.quant.buffers["codes"].shape[0]
        self.copies = [tile, *(MatrixCopy(kb, plan, self.pointers, at, tiles, first_k, start)
                               for at, start in zip(first, self.starts, strict=True))]
        self.stage_bytes = plan.stage_bytes

    def make_fragments(self) -> None:
        tile = self.tiles[0]
        self.fragments = [
            Fragments(self.kb, tile.operand.dtype, tile.tile, tile.mn_major, False, self.row, self.warp_m,
                      self.steps, tile.start),
            *(MatrixFragments(self.kb, self.quant, self.column, start) for start in self.starts)]
