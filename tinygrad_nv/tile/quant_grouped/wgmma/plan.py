"""Plan of `quant_grouped_wgmma`, which follows from a spec and a schedule.

Protocol: that of grouped_gemm/wgmma/plan.py with `swap`, and of quant_gemm/wgmma/plan.py: rows of the
computed matmul are those of a quantised matrix, with an activation of two, columns are rows of a group. A
stage has boxes of gate and then of up; of both each consumer has the same rows.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from tinygrad_nv.tile.grouped_gemm.wgmma.plan import GroupedPlan
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.wgmma.plan import MatrixStages
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec


@dataclass(frozen=True)
class QuantGroupedPlan(MatrixStages, GroupedPlan):
    """See above. `quant` is of one matrix, `stack` of all."""
    schedule: QuantGroupedWgmma
    quant: QuantGemmSpec
    stack: QuantGroupedSpec
    MOST_BOXES: ClassVar[int] = 2
    MOST_ROWS: ClassVar[int] = 384      # boxes have tiles of 16 of them
    MOST_SWAPPED: ClassVar[int] = 160

    @staticmethod
    @lru_cache(1024)
    def of(stack: QuantGroupedSpec, s: QuantGroupedWgmma) -> QuantGroupedPlan:
        """The plan."""
        made = GroupedPlan.of(stack.grouped, s)
        return QuantGroupedPlan(made.spec, s, made.a, made.b, made.grouped, stack.matrix, stack)

    @property
    def halves(self) -> int: return self.grouped.halves

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return self.matrix_bytes + self.b.nbytes
