"""Cost of `gemm_wgmma`."""
from __future__ import annotations

from typing import TYPE_CHECKING

from tinygrad_nv.tile.gemm.cost import Cost
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import (
    INSTRUCTION_BYTES,
    SCHEDULERS,
    SMEM_BYTES_PER_CYCLE,
    Ending,
    Work,
    ending_cycles,
)
from tinygrad_nv.tile.gpu import GPUModel

if TYPE_CHECKING:
    from tinygrad_nv.ptx.emulator.report import Stats

STORE_OPERATIONS = 4.0
WARP_STEP = 45                      # instructions of a consumer's warp for a stage: wait, wgmmas, release


class WgmmaCost(Cost[Wgmma]):
    """One CTA stays on each SM, whose producer loads the next tile while consumers store one."""
    hbm_share = 0.90
    barrier_cycles = 10
    loads_ahead = True
    by_mma = False
    cluster_tiles = 2

    def work(self, spec: GemmSpec, s: Wgmma, gpu_model: GPUModel, end: Ending) -> Work:
        size = spec.a.dtype.itemsize
        steps_of_k = s.block_k * size / INSTRUCTION_BYTES
        read = -(-s.block_m // 64) * (64 + s.block_n) * steps_of_k * INSTRUCTION_BYTES
        issue = WARP_STEP * 4 * (1 if s.mode == "pingpong" else s.consumers) / SCHEDULERS
        return Work(s.block_m * s.block_n * s.block_k / self.multiply_rate(spec, gpu_model),
                    (read + s.stage_bytes(size)) / SMEM_BYTES_PER_CYCLE, issue,
                    ending_cycles(s.block_m * s.tile(spec).columns, end, STORE_OPERATIONS), s.depth - 1)

    def resident(self, spec: GemmSpec, s: Wgmma, gpu_model: GPUModel, registers: int) -> int: return 1

    def flags(self, s: Wgmma, arch: str) -> bool: return s.stream

    def copy_bytes(self, stats: Stats, s: Wgmma) -> float:
        """TMA has no passes, as cp.async has; what is multicast is counted once."""
        asked = s.block_m / s.cluster_n + s.block_n / s.cluster_m
        return stats.asynchronous_bytes * (s.block_m + s.block_n) / asked
