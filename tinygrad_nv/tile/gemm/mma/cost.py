"""Cost of `gemm_mma`."""
from __future__ import annotations

from tinygrad_nv.tile.gemm.cost import Cost, resident_ctas
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gemm.work import (
    INSTRUCTION_BYTES,
    SCHEDULERS,
    SMEM_BYTES_PER_CYCLE,
    Ending,
    Work,
    chunk_bytes,
    ending_cycles,
)
from tinygrad_nv.tile.gpu import GPUModel

STORE_OPERATIONS = 4.0
REGISTERS_BESIDE = 56               # those of sums


class MmaCost(Cost[Mma]):
    """Warps read their operands from shared memory, and multiply."""
    hbm_share = 0.88
    barrier_cycles = 40

    def work(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, end: Ending) -> Work:
        size = spec.a.dtype.itemsize
        products = s.block_m * s.block_n * s.block_k
        read = (s.block_m * s.warps_n + s.block_n * s.warps_m) * s.block_k * size
        issued = products / (16 * 8) / (INSTRUCTION_BYTES / size) + read / 512 + _copies(spec, s)
        return Work(products / self.multiply_rate(spec, gpu_model),
                    (read + s.stage_bytes(size)) / SMEM_BYTES_PER_CYCLE, issued / SCHEDULERS,
                    ending_cycles(s.block_m * s.tile(spec).columns, end, STORE_OPERATIONS), s.depth - 1)

    def resident(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, registers: int) -> int:
        smem = 1024 + spec.a.dtype.itemsize * (s.depth * (s.block_m + s.block_n) * s.block_k)
        beside = min(255, s.block_m * s.block_n // s.threads + REGISTERS_BESIDE)
        return resident_ctas(gpu_model, s.threads, smem, registers or beside)

    def compute(self, s: Mma, done: Work, ctas: int) -> float:
        """mma.sync waits for its operands: with one warp a scheduler a quarter of the time, with two an
        eighth. Its warps issue both, products and reads."""
        warps = s.threads / 32 / SCHEDULERS * ctas
        tensor = done.tensor / (1 - 0.25 / warps if warps > 1 else 0.75 * warps)
        return max(tensor, done.shared) + 0.2 * min(tensor, done.shared)

    def flags(self, s: Mma, arch: str) -> bool: return s.splits > 1


def _copies(spec: GemmSpec, s: Mma) -> float:
    """Instructions of warps that bring a stage: five for each chunk of a lane."""
    elements = ((spec.a, s.block_m * s.block_k), (spec.b, s.block_n * s.block_k))
    return sum(5 * count * operand.dtype.itemsize / chunk_bytes(operand) / 32 for operand, count in elements)
