"""Plan of `flash_mma`, which follows from a spec and a schedule: extents and bytes. Numbers only.

Protocol: `FlashMmaPlan.of` computes, and refuses nothing. Both legality.py and the kernel take their
arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, multiple
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.spec import Result, StoreTarget
from tinygrad_nv.tile.store_plan import StorePlan, store_plan, warp_tile

HELD = 180           # registers for sums, scores and q that leave room for addresses and fragments
HELD_BESIDE = 150    # the same, where scores are more than multiples of sums, or dropped


@dataclass(frozen=True)
class FlashMmaPlan:
    """An attention by a schedule."""
    spec: AttentionSpec
    schedule: FlashMma

    @staticmethod
    @lru_cache(1024)
    def of(spec: AttentionSpec, schedule: FlashMma) -> FlashMmaPlan:
        """The plan."""
        return FlashMmaPlan(spec, schedule)

    @property
    def d(self) -> int:
        """Elements of a row of q and of keys in shared memory."""
        return pad_head(self.spec.d)

    @property
    def d_v(self) -> int:
        """Elements of a row of values in shared memory."""
        return pad_head(self.spec.d_v)

    @property
    def warp_m(self) -> int:
        """Rows of a warp."""
        return self.schedule.block_m // self.schedule.warps_m

    @property
    def stage_bytes(self) -> int:
        """Keys and values of a block of columns."""
        return self.schedule.block_n * (self.d + self.d_v) * 2

    @property
    def q_bytes(self) -> int:
        """Rows of q in shared memory."""
        return self.schedule.block_m * self.d * 2

    @property
    def sums(self) -> int:
        """Registers a thread that hold sums: of the result, and scores of a block."""
        return self.warp_m * (self.d_v + self.schedule.block_n) // 32

    @cached_property
    def holds_queries(self) -> bool:
        """Whether fragments of q stay in registers."""
        most = HELD_BESIDE if multiple(self.spec.score) is None or self.spec.kept < KEEP_ALL else HELD
        return self.sums + self.warp_m * self.d // 64 <= most

    @property
    def q_in_ring(self) -> bool:
        """Whether q lies in the ring's last stage, until that is needed."""
        return self.holds_queries and self.q_bytes <= self.stage_bytes

    @property
    def store_target(self) -> StoreTarget:
        """The result, for its store."""
        spec = self.spec
        out = Result(spec.out.dtype, spec.out.row, 1, spec.out.batch, spec.out.offset)
        batch = (1, *spec.batch[1:]) if spec.is_ragged else spec.batch  # one sequence's
        symbolic = spec.is_ragged or "s_q" in spec.symbolic
        return StoreTarget(out, spec.s_q, spec.d_v, batch, Sum().cast(out.dtype), symbolic)

    @cached_property
    def store(self) -> StorePlan:
        """How the result is stored."""
        return store_plan(self.store_target,
                          warp_tile(self.schedule.block_m, self.d_v, self.schedule.warps_m))

    @property
    def ring_bytes(self) -> int:
        """The ring, which is where the result is stored from."""
        return max(self.schedule.depth * self.stage_bytes, self.store.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        """All of shared memory."""
        return self.ring_bytes + (0 if self.q_in_ring else self.q_bytes)


def pad_head(d: int) -> int:
    """Elements of a row in shared memory: whole steps of a product."""
    return -(-d // 16) * 16
