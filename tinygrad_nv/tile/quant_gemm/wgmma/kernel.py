"""Matmuls with a quantised matrix by wgmma: that of gemm/wgmma/kernel.py, transposed, whose operand A comes
from codes. Rows of the computed matmul are those of the matrix, columns are rows of activations.

    producer, one thread                       consumers, a warpgroup each
        codes, factors, activations                codes to registers (main_loop.py), times activations

Operand A is in registers: elements take no shared memory, and no second way through it. As Machete (vLLM)
does it.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.quant_gemm.schedules import QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.wgmma.load import QuantLoads
from tinygrad_nv.tile.quant_gemm.wgmma.main_loop import QuantMainLoop
from tinygrad_nv.tile.quant_gemm.wgmma.plan import QuantWgmmaPlan
from tinygrad_nv.tile.template import GPU


def quant_wgmma(spec: QuantGemmSpec, schedule: QuantWgmma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    plan = QuantWgmmaPlan.of(spec, schedule)
    ctas = plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, gpu.clusters)
    kb = Kernel("quant_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1,
               cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else ())
    return QuantWgmmaKernel(kb, plan, ctas).emit_kernel()


class QuantWgmmaKernel(WgmmaKernel):
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: QuantWgmmaPlan, ctas: int) -> None:
        self.quant, self.OPERANDS = plan, ("a", *plan.quant.buffers)
        super().__init__(kb, plan, ctas)

    def make_loads(self, first_pointer: int) -> QuantLoads:
        self.copies = QuantLoads(self.kb, self.quant, first_pointer)
        return self.copies

    def make_main_loop(self, pointers: Mapping[str, Value], rows: Value | int) -> QuantMainLoop:
        return QuantMainLoop(self.kb, self.quant, self.ring, self.ordered, self.copies)
