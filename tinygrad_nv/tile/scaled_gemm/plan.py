"""Scales of a stage in shared memory: those of the tile's rows, then those of its columns. Numbers only.

`problems` is what `scaled_wgmma` asks of a schedule: that of gemm/wgmma, blocks of scales, and room for them.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledWgmma
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, ScaledGemmSpec

LOADERS = 96    # threads that copy scales: those of the producer's warpgroup beside TMA's warp
MOST_FINE_COLUMNS = 64      # whose scales a thread reads one by one: a quarter of them


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


def problems(spec: ScaledGemmSpec, schedule: ScaledWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    return wgmma.problems(spec, schedule, arch) or _blocks(spec, schedule) or _room(spec, schedule)


def _blocks(spec: ScaledGemmSpec, s: ScaledWgmma) -> list[str]:
    """The blocks of scales against the tile."""
    a, b = (spec.b_scale, spec.a_scale) if s.swap else (spec.a_scale, spec.b_scale)
    out = []
    if s.block_k != GROUP: out.append(f"block_k={s.block_k}: a stage is a group of {GROUP}")
    if a.rows > 1 and a.rows % 64: out.append(f"scales {a} of the rows: 1 or a multiple of wgmma's 64")
    if b.rows == 1:
        if s.block_n > MOST_FINE_COLUMNS:
            out.append(f"block_n={s.block_n} columns with a scale each, at most {MOST_FINE_COLUMNS}")
    elif b.rows % 8 or (b.rows % s.block_n and s.block_n % b.rows):
        out.append(f"block_n={s.block_n} and scales {b} of the columns: neither divides the other")
    return out


def _room(spec: ScaledGemmSpec, s: ScaledWgmma) -> list[str]:
    """Shared memory, with the scales of the stages."""
    plan, most = WgmmaPlan.of(spec, s), limits.SMEM_BYTES["sm_90a"]
    scales, staging = ScalePlan.of(plan).nbytes * s.depth, -(-plan.store.smem_bytes // 1024) * 1024
    needed = s.depth * plan.stage_bytes + staging + plan.barrier_bytes + -(-scales // 16) * 16
    if needed <= most: return []
    return [f"{s.depth} stages × {plan.stage_bytes} B + {staging} B to store from + {scales} B of scales + "
            f"{plan.barrier_bytes} B of barriers = {needed} B of shared memory, sm_90a has {most}"]
