"""Plan of `quant_mma`, which follows from a spec and a schedule.

Protocol: that of gemm/mma/plan.py; a stage has a tile of activations, and for each part the boxes of its
columns (stages.py).
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantMma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, boxes


@dataclass(frozen=True)
class QuantMmaPlan(MmaPlan):
    """See above."""
    schedule: QuantMma
    quant: QuantGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(quant: QuantGemmSpec, s: QuantMma) -> QuantMmaPlan:
        """The plan."""
        return QuantMmaPlan(quant.gemm, s, quant)

    @property
    def type(self) -> QType: return self.quant.type

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Codes and factors of the columns of one part."""
        return boxes(self.quant, self.columns, self.schedule.block_k)

    @property
    def activation_bytes(self) -> int:
        """Bytes of a stage's activations."""
        return self.schedule.block_m * self.schedule.block_k * self.spec.a.dtype.itemsize

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        nbytes = self.activation_bytes + self.spec.parts * self.boxes[-1].end
        return -(-nbytes // 1024) * 1024

    @property
    def ring_bytes(self) -> int: return self.schedule.depth * self.stage_bytes
