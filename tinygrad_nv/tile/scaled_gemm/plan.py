"""Scales of a stage in shared memory: those of the tile's rows, then those of its columns. Numbers only."""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec

LOADERS = 96    # threads that copy scales: those of the producer's warpgroup beside TMA's warp


@dataclass(frozen=True)
class ScalePlan:
    """Scales of the computed matmul, whose operands have changed places where the schedule is swapped."""
    spec: ScaledGemmSpec
    plan: WgmmaPlan

    @staticmethod
    def of(plan: WgmmaPlan) -> ScalePlan:
        """Returns the scales of a plan."""
        assert isinstance(plan.spec, ScaledGemmSpec)
        return ScalePlan(plan.spec, plan)

    @property
    def each_row(self) -> bool:
        """Whether each row has its scale; else all of 64 rows have one."""
        return self.spec.a_scale.rows == 1

    @property
    def each_column(self) -> bool: return self.spec.b_scale.rows == 1

    @property
    def rows(self) -> int:
        """Scales of a tile's rows."""
        return -(-self.plan.schedule.block_m // self.spec.a_scale.rows)

    @property
    def columns(self) -> int:
        """Scales of a tile's columns."""
        return -(-self.plan.columns // self.spec.b_scale.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of a stage."""
        return 4 * (self.rows + self.columns)

    @property
    def row_offsets(self) -> list[int]:
        """A thread's scales of rows, from its first on: two of each 64 rows, or one."""
        if self.each_row: return [64 * i + 8 * h for i in range(self.plan.subtiles) for h in range(2)]
        return [64 * i // self.spec.a_scale.rows for i in range(self.plan.subtiles)]

    @property
    def column_offsets(self) -> list[int]:
        """A thread's scales of columns, from its first on: two of each eight, or those of all blocks."""
        if not self.each_column: return list(range(self.columns))
        return [8 * i + e for i in range(self.plan.columns // 8) for e in range(2)]
