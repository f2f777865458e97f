"""Plan of `scaled_mma`, which follows from a spec and a schedule.

Protocol: that of gemm/mma/plan.py. A stage is a group of K: a tile of A, one of B, then the scales of the
tile's rows and those of its columns. Each side has a scale of each row, of each block, or one of all where a
block has all rows that there are.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.scaled_gemm.schedules import STAGE_BYTES, ScaledMma
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec

PLACE_BYTES = 16        # what places of scales are multiples of


@dataclass(frozen=True)
class Side:
    """Scales of one operand: those of a tile's `block` rows, of which a warp has `share`, where a matrix has
    `extent`."""
    scales: BlockScales
    extent: int
    block: int
    share: int

    @property
    def one(self) -> bool:
        """Whether all rows of the tile have one."""
        return self.scales.rows >= min(self.extent, self.block)

    @property
    def each(self) -> bool:
        """Whether each row has its scale."""
        return self.scales.rows == 1 and not self.one

    @property
    def count(self) -> int:
        """Scales of the tile."""
        return 1 if self.one else self.block // self.scales.rows

    @property
    def nbytes(self) -> int:
        """Shared memory of these."""
        return -(-4 * self.count // PLACE_BYTES) * PLACE_BYTES

    def index(self, row: int) -> int:
        """Returns the index of a row of the warp's share, after that of the share's first row."""
        return 0 if self.one else row // self.scales.rows


@dataclass(frozen=True)
class ScaledMmaPlan(MmaPlan):
    """See above."""
    spec: ScaledGemmSpec
    schedule: ScaledMma

    @staticmethod
    @lru_cache(1024)
    def of(spec: ScaledGemmSpec, s: ScaledMma) -> ScaledMmaPlan:
        """The plan; of the transposed matmul where the schedule is swapped."""
        return ScaledMmaPlan(spec.swap_operands() if s.swap else spec, s)

    @property
    def ends_within(self) -> bool:
        """Whether K ends within a group."""
        return self.spec.k % GROUP > 0

    @property
    def row_scales(self) -> Side:
        """Scales of A."""
        return Side(self.spec.a_scale, self.spec.m, self.schedule.block_m, self.warp_m)

    @property
    def column_scales(self) -> Side:
        """Scales of B."""
        return Side(self.spec.b_scale, self.spec.n, self.columns, self.warp_n)

    @property
    def scales_start(self) -> int:
        """Bytes of a stage before its scales."""
        return self.schedule.stage_bytes(self.spec.a.dtype.itemsize)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        nbytes = self.scales_start + self.row_scales.nbytes + self.column_scales.nbytes
        return -(-nbytes // STAGE_BYTES) * STAGE_BYTES

    @property
    def ring_bytes(self) -> int: return self.schedule.depth * self.stage_bytes
