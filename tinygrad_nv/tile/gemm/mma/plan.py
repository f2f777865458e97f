"""Plan of `gemm_mma`, which follows from a spec and a schedule: tiles and counts. Numbers only.

Protocol: `MmaPlan.of` is for pairs that template.py allows; it computes, and refuses nothing. Both the check
and the kernel take their arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad.dtype import DType

from tinygrad_nv.tile.fragments import STEP_BYTES
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec
from tinygrad_nv.tile.store_plan import StorePlan, store_plan, warp_tile

ARRIVED = 4             # bytes in which a CTA's threads are told whether it comes last
PROMOTED_STEPS = 4      # 128 of K, after which sums of 8-bit floats go to float32, or after a stage of less


def needs_promotion(dtype: DType, arch: str) -> bool:
    """Whether the tensor cores keep only 13 bits of a sum's fraction. Hopper's mma.sync has float16 of them,
    and sums of float32."""
    return dtype in FP8 and arch == "sm_89"


@dataclass(frozen=True)
class MmaPlan:
    """A matmul by a schedule. Rows and columns are the computed matmul's: operands have changed places
    where the schedule is swapped."""
    spec: GemmSpec
    schedule: Mma

    @staticmethod
    @lru_cache(1024)
    def of(spec: GemmSpec, schedule: Mma) -> MmaPlan:
        """The plan; of the transposed matmul where the schedule is swapped."""
        return MmaPlan(spec.swap_operands() if schedule.swap else spec, schedule)

    @property
    def columns(self) -> int:
        """Columns of the result that a tile has."""
        return self.schedule.block_n // self.spec.parts

    @property
    def warp_m(self) -> int:
        """Rows of a warp's share of a tile."""
        return self.schedule.block_m // self.schedule.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of a warp's share of a tile."""
        return self.columns // self.schedule.warps_n

    @property
    def steps(self) -> int:
        """Products along the K of a stage."""
        return self.schedule.block_k * self.spec.a.dtype.itemsize // STEP_BYTES

    @property
    def iterations(self) -> int:
        """Stages of one tile."""
        return -(-self.spec.k // self.schedule.block_k)

    @property
    def sums(self) -> int:
        """Sums a thread holds."""
        return self.schedule.block_m * self.schedule.block_n // self.schedule.threads

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages."""
        return self.schedule.depth * self.schedule.stage_bytes(self.spec.a.dtype.itemsize)

    @cached_property
    def store(self) -> StorePlan:
        """How the result is stored: each warp its share."""
        s = self.schedule
        return store_plan(self.spec.store_target, warp_tile(s.block_m, self.columns, s.warps_m, s.warps_n))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the kernel: the ring, or what is stored from; of splits, which came last, too."""
        return max(self.ring_bytes, self.store.smem_bytes) + ARRIVED * (self.schedule.splits > 1)
