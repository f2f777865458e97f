"""Cost of `scaled_mma`."""
from __future__ import annotations

from tinygrad_nv.tile.gemm.cost import resident_ctas
from tinygrad_nv.tile.gemm.mma.cost import REGISTERS_BESIDE, MmaCost
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import SCHEDULERS, Ending, Work
from tinygrad_nv.tile.gpu import GPUModel
from tinygrad_nv.tile.scaled_gemm.mma.plan import ScaledMmaPlan
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledMma
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec


class ScaledMmaCost(MmaCost):
    """An addition in float32 for each sum of a group, and twice as many sums."""

    def work(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, end: Ending) -> Work:
        done = super().work(spec, s, gpu_model, end)
        return done._replace(issue=done.issue + s.block_m * s.block_n / 32 / SCHEDULERS)

    def resident(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, registers: int) -> int:
        assert isinstance(spec, ScaledGemmSpec)
        assert isinstance(s, ScaledMma)
        beside = min(255, 2 * s.block_m * s.block_n // s.threads + REGISTERS_BESIDE)
        return resident_ctas(gpu_model, s.threads, 1024 + ScaledMmaPlan.of(spec, s).ring_bytes,
                             registers or beside)
