"""Plan of `flash_mma`, which follows from a spec and a schedule: extents and bytes. Numbers only.

Protocol: `FlashMmaPlan.of` computes, and refuses nothing. `problems` and the kernel take their
arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.mma.copy import LEAST_BYTES
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, OPERANDS, AttentionSpec, multiple
from tinygrad_nv.tile.expression import Sum, short
from tinygrad_nv.tile.gemm.spec import Result, StoreTarget
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.store_plan import StorePlan, store_plan, warp_tile

HELD = 180           # registers for sums, scores and q that leave room for addresses and fragments
HELD_BESIDE = 150    # the same, where scores are more than multiples of sums, or dropped
BLOCKS_N = (16, 32, 64, 128)
MOST_SUMS = 192      # registers for sums and probabilities, with fragments of q read each time


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


def problems(spec: AttentionSpec, schedule: FlashMma, arch: str) -> list[str]:
    """Why `flash_mma` cannot have this schedule; empty when it can."""
    s, out = schedule, _spec_problems(spec)
    if s.block_m % (16 * s.warps_m):
        out.append(f"block_m={s.block_m} is not a multiple of {s.warps_m} warps × 16 = {16 * s.warps_m}")
    if s.block_n not in BLOCKS_N:
        out.append(f"block_n={s.block_n} is not {', '.join(map(str, BLOCKS_N))}")
    if s.warps_m not in (1, 2, 4, 8, 16): out.append(f"{s.warps_m} warps are not 1, 2, 4, 8 or 16")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out or [*_resource_problems(FlashMmaPlan.of(spec, s), arch), *epilogue.problems(spec.score, arch)]


def _spec_problems(spec: AttentionSpec) -> list[str]:
    """Returns the problems of the operands, whatever the schedule."""
    if spec.q.dtype not in OPERANDS:
        other = "flash_fma" if spec.q.dtype == dtypes.float32 else "flash_wgmma, for sm_90a"
        return [f"operands of {short(spec.q.dtype)} are of {other}"]
    out = [f"{name}={d} is not a multiple of 8" for name, d in (("d", spec.d), ("d_v", spec.d_v)) if d % 8]
    out += [f"rows of {name} are aligned to {rows.alignment_bytes} B, cp.async copies {LEAST_BYTES} and more"
            for name, rows in (("q", spec.q), ("k", spec.k), ("v", spec.v))
            if rows.alignment_bytes < LEAST_BYTES]
    heads = spec.batch[1] * spec.batch[2]
    return out + [f"{count} {name} are above {MOST_GRID}, a grid's" for name, count in
                  (("heads", heads), ("batches", spec.batch[0] + spec.is_ragged)) if count > MOST_GRID]


def _resource_problems(plan: FlashMmaPlan, arch: str) -> list[str]:
    out, most = [], limits.SMEM_BYTES[arch]
    if plan.smem_bytes > most:
        out.append(f"{plan.schedule.depth} stages × {plan.stage_bytes} B and q are {plan.smem_bytes} B of "
                   f"shared memory, {arch} has {most}")
    if plan.sums > MOST_SUMS:
        out.append(f"{plan.warp_m} rows of a warp × ({plan.d_v} + {plan.schedule.block_n}) / 32 lanes "
                   f"= {plan.sums} sums a thread, at most {MOST_SUMS}")
    return out
