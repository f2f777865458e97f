"""Matmuls with a 2:4 sparse matrix by wgmma.sp: that of gemm/wgmma/kernel.py, transposed, as operand A is the
one that may be sparse. Rows of the computed matmul are those of the matrix, columns rows of activations.

    producer, one thread                           consumers, a warpgroup each
        values, activations, metadata                  metadata to registers (main_loop.py), wgmma.sp

A wgmma.sp takes the time of a wgmma of half of its columns.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.sparse_gemm.schedules import SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.sparse_gemm.wgmma.load import SparseLoads
from tinygrad_nv.tile.sparse_gemm.wgmma.main_loop import SparseMainLoop
from tinygrad_nv.tile.sparse_gemm.wgmma.plan import SparseWgmmaPlan
from tinygrad_nv.tile.template import GPU


def sparse_wgmma(spec: SparseGemmSpec, schedule: SparseWgmma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    plan = SparseWgmmaPlan.of(spec, schedule)
    ctas = plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, gpu.clusters)
    kb = Kernel("sparse_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1,
               cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else ())
    return SparseWgmmaKernel(kb, plan, ctas).emit_kernel()


class SparseWgmmaKernel(WgmmaKernel):
    """The kernel as it is written."""
    OPERANDS = ("a", "values", "metadata")

    def __init__(self, kb: Kernel, plan: SparseWgmmaPlan, ctas: int) -> None:
        self.sparse = plan
        super().__init__(kb, plan, ctas)

    def make_loads(self, first_pointer: int) -> SparseLoads:
        self.copies = SparseLoads(self.kb, self.sparse)
        return self.copies

    def make_main_loop(self, pointers: Mapping[str, Value], rows: Value | int) -> SparseMainLoop:
        return SparseMainLoop(self.kb, self.sparse, self.ring, self.ordered, self.copies)
