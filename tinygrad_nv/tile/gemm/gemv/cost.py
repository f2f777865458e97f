"""Cost of `gemv`."""
from __future__ import annotations

from tinygrad_nv.tile.gemm.cost import Cost, resident_ctas
from tinygrad_nv.tile.gemm.gemv.plan import MOST_CLUSTERED, GemvPlan
from tinygrad_nv.tile.gemm.schedules import Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import Ending, Work, ending_cycles
from tinygrad_nv.tile.gpu import STREAMING, GPUModel

STORE_OPERATIONS = 10.0
REGISTERS = 64                      # of a thread, about
# of the rate of one row that several rows reach: of 84 schedules on an H100, 2 to 16 rows, the best took 1.00
# to 1.12 and half of them more than 1.3 times what one row's rate predicts
SEVERAL_ROWS = 0.8


class GemvCost(Cost[Gemv]):
    """Weights stream from HBM past L1; what multiplies them hardly matters."""
    hbm_share = STREAMING
    streams = True

    def flops_per_s(self, spec: GemmSpec, gpu_model: GPUModel) -> float:
        return 2.0 * gpu_model.fp32_fma * gpu_model.sm_count * gpu_model.clock_hz

    def streaming(self, spec: GemmSpec, s: Gemv) -> float:
        return self.hbm_share * (SEVERAL_ROWS if min(spec.m, spec.n) > 1 else 1.0)

    def work(self, spec: GemmSpec, s: Gemv, gpu_model: GPUModel, end: Ending) -> Work:
        """A weight goes to the tensor cores, or is widened and multiplied for each row."""
        plan = GemvPlan.of(spec, s)
        lanes = s.tile(spec).width * s.block_k * (1.0 if plan.tensor else 1.5 + 1.25 * plan.spec.m)
        finish = ending_cycles(min(spec.m, spec.n) * s.block_n, end, STORE_OPERATIONS)
        return Work(0, 0, lanes / gpu_model.fp32_fma, finish, plan.warps_k)

    def resident(self, spec: GemmSpec, s: Gemv, gpu_model: GPUModel, registers: int) -> int:
        smem = 1024 + spec.a.dtype.itemsize * (min(spec.m, spec.n) * spec.k // s.splits)
        return resident_ctas(gpu_model, s.threads, smem, registers or REGISTERS)

    def cluster_ctas(self, s: Gemv, arch: str) -> int:
        return s.splits if s.splits <= MOST_CLUSTERED and arch == "sm_90a" else 1

    def flags(self, s: Gemv, arch: str) -> bool:
        """A few splits meet in a cluster, where there are any."""
        return s.splits > self.cluster_ctas(s, arch)
