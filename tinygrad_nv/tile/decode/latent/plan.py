"""Plan of `latent_wgmma`, which follows from a spec and a schedule: tiles and bytes. Numbers only.

Protocol: a CTA has 64 of a key head's rows and one split of a request's keys (`SplitPlan`). A tile of
`block_n` latents lies in shared memory once: as keys it is K-major, `block_n` rows of d elements, and its
columns from `values_at` on are the values, MN-major. Each of two warpgroups has half of these.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile.decode.plan import SplitPlan
from tinygrad_nv.tile.decode.schedules import LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.wgmma_tiles import OperandTile

ROWS, STEP = 64, 16             # of a wgmma; elements of the sum that it takes
WARPGROUP, CONSUMERS = 128, 2   # threads; warpgroups that multiply
SPAN = 128                      # bytes of a row of a column of boxes
COLUMN = SPAN // 2              # elements of it
REGISTERS = 56, 224             # of a thread that loads, and of one that multiplies: 56 + 2 · 224 ≤ 512
LANES = 32


@dataclass(frozen=True)
class LatentPlan(SplitPlan):
    """Plan of a spec and a schedule."""
    schedule: LatentWgmma

    @staticmethod
    @lru_cache(1024)
    def of(spec: DecodeSpec, schedule: LatentWgmma) -> LatentPlan:
        """The plan."""
        return LatentPlan(spec, schedule)

    @property
    def row_blocks(self) -> int: return -(-self.spec.rows // ROWS)

    @property
    def blocks(self) -> int:
        """Work tiles of a split: blocks of rows of all key heads."""
        return self.spec.heads * self.row_blocks

    @property
    def work_tiles(self) -> int:
        """Most work tiles of all requests."""
        return self.spec.batch * self.most_splits * self.blocks

    @property
    def each(self) -> int:
        """Requests that a lane counts."""
        return -(-self.spec.batch // LANES)

    @property
    def values_at(self) -> int:
        """The element of a latent with which its value begins."""
        return self.spec.v.offset - self.spec.k.offset

    @property
    def half(self) -> int:
        """Columns of values of a warpgroup."""
        return self.spec.d_v // CONSUMERS

    @property
    def kind(self) -> str:
        """The operands' dtype as PTX has it."""
        return short(self.spec.q.dtype)

    # **** shared memory ****

    @property
    def queries(self) -> OperandTile: return OperandTile(self.spec.q.dtype, "K", ROWS, self.spec.d, SPAN)

    @property
    def keys(self) -> OperandTile:
        """A tile of latents as keys."""
        return OperandTile(self.spec.k.dtype, "K", self.schedule.block_n, self.spec.d, SPAN)

    @property
    def values(self) -> OperandTile:
        """Half of the columns of values in it."""
        return OperandTile(self.spec.k.dtype, "MN", self.half, self.schedule.block_n, SPAN)

    @property
    def weights(self) -> OperandTile:
        """The weights of a tile, for the warpgroup that does not compute them."""
        n = self.schedule.block_n
        return OperandTile(self.spec.q.dtype, "K", ROWS, n, min(SPAN, 2 * n))

    @property
    def smem_bytes(self) -> int:
        """All of shared memory: also three numbers of each row, one of each request, and barriers."""
        tiles = self.queries.nbytes + self.keys.nbytes * self.schedule.depth + self.weights.nbytes
        return tiles + 12 * ROWS + 4 * LANES * (self.each + 1) + 16 + 8 * (2 * self.schedule.depth + 2)
