"""Plan of `flash_fma`, which follows from a spec and a schedule: extents and bytes. Numbers only.

Protocol: `FlashFmaPlan.of` computes, and refuses nothing. Both legality.py and the kernel take their
arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import AttentionSpec

SIZE = 4                   # bytes of a float
MOST_SUMS = 152            # registers for sums and scores that leave room for operands and addresses


@dataclass(frozen=True)
class FlashFmaPlan:
    """An attention by a schedule."""
    spec: AttentionSpec
    schedule: FlashFma

    @staticmethod
    @lru_cache(1024)
    def of(spec: AttentionSpec, schedule: FlashFma) -> FlashFmaPlan:
        """The plan."""
        return FlashFmaPlan(spec, schedule)

    @property
    def d(self) -> int:
        """Elements of a row of q and of keys in shared memory."""
        return -(-self.spec.d // 16) * 16

    @property
    def d_v(self) -> int:
        """Elements of a row of values in shared memory: eight lanes have four of each 32."""
        return -(-self.spec.d_v // 32) * 32

    @property
    def warp_m(self) -> int:
        """Rows of a warp."""
        return self.schedule.block_m // self.schedule.warps_m

    @property
    def warp_columns(self) -> int:
        """Columns of a warp, in a block."""
        return self.schedule.block_n // self.schedule.warps_n

    @property
    def pitch(self) -> int:
        """Bytes between rows of a warp's probabilities in shared memory: 8 or 24 elements more than a
        multiple of 32, so that four rows of pairs lie in 32 banks."""
        columns = self.warp_columns
        return (columns if columns % 16 else columns + 8) * SIZE

    @property
    def stage_bytes(self) -> int:
        """Keys and values of a block of columns."""
        return self.schedule.block_n * (self.d + self.d_v) * SIZE

    @property
    def weight_bytes(self) -> int:
        """Probabilities of a warp."""
        return self.warp_m * self.pitch

    @property
    def reduction_bytes(self) -> int:
        """Bytes that warps with the same rows exchange at the end: running maxima and sums of each, then the
        result of all but the first."""
        s = self.schedule
        if s.warps_n == 1: return 0
        rows = s.warps_m * s.warps_n * (self.warp_m // 8) * 32 * 2 * SIZE
        return max(rows, (s.warps_n - 1) * s.block_m * self.d_v * SIZE)

    @property
    def sums(self) -> int:
        """Registers a thread that hold sums: of the result, and scores of a block."""
        return self.warp_m * (self.d_v + self.warp_columns) // 32

    @property
    def chains(self) -> int:
        """By how many sums, of every second or fourth element, a lane adds up a score: four have half the
        rounding error of one. As many as there are registers for."""
        return next((n for n in (4, 2)
                     if self.warp_m * (self.d_v + n * self.warp_columns) // 32 <= MOST_SUMS), 1)

    @property
    def ring_bytes(self) -> int:
        """The ring, which is where warps exchange results at the end."""
        return max(self.schedule.depth * self.stage_bytes, self.reduction_bytes)

    @property
    def smem_bytes(self) -> int:
        """Shared memory: the ring, q, and probabilities of all warps."""
        s = self.schedule
        return self.ring_bytes + s.block_m * self.d * SIZE + s.warps_m * s.warps_n * self.weight_bytes
