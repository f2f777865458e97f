"""Plan of `flash_fma`, which follows from a spec and a schedule: extents and bytes. Numbers only.

Protocol: `FlashFmaPlan.of` computes, and refuses nothing. `problems` and the kernel take their
arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, multiple
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.limits import MOST_GRID

SIZE = 4                   # bytes of a float
MOST_SUMS = 152            # registers for sums and scores that leave room for operands and addresses
COLUMNS = (8, 16, 32, 64)  # of a warp, in a block
MOST_BESIDE = 150          # sums, where scores are more than multiples of sums


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


def problems(spec: AttentionSpec, schedule: FlashFma, arch: str) -> list[str]:
    """Why `flash_fma` cannot have this schedule; empty when it can."""
    s, out, plan = schedule, _spec_problems(spec), FlashFmaPlan.of(spec, schedule)
    if s.block_m % (16 * s.warps_m) or s.block_m & (s.block_m - 1):
        out.append(f"block_m={s.block_m} is not a power of two, {s.warps_m} warps × 16 = {16 * s.warps_m} or "
                   "more")
    if s.block_n % s.warps_n or plan.warp_columns not in COLUMNS:
        out.append(f"block_n={s.block_n} of {s.warps_n} warps is not {', '.join(map(str, COLUMNS))} for each")
    if s.threads not in (32, 64, 128, 256, 512):
        out.append(f"{s.warps_m} x {s.warps_n} warps are not 1, 2, 4, 8 or 16")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out or [*_resource_problems(plan, arch), *epilogue.problems(spec.score, arch)]


def _spec_problems(spec: AttentionSpec) -> list[str]:
    """Returns the problems of the operands, whatever the schedule."""
    out = [] if spec.q.dtype == dtypes.float32 else [f"operands of {short(spec.q.dtype)} are not float32"]
    if spec.is_ragged: out.append("a ragged batch")
    if spec.kept < KEEP_ALL: out.append("dropout")
    heads = spec.batch[1] * spec.batch[2]
    return out + [f"{count} {name} are above {MOST_GRID}, a grid's" for name, count in
                  (("heads", heads), ("batches", spec.batch[0])) if count > MOST_GRID]


def _resource_problems(plan: FlashFmaPlan, arch: str) -> list[str]:
    out, most = [], limits.SMEM_BYTES[arch]
    if plan.smem_bytes > most:
        out.append(f"{plan.schedule.depth} stages × {plan.stage_bytes} B, q and probabilities are "
                   f"{plan.smem_bytes} B of shared memory, {arch} has {most}")
    room = MOST_BESIDE if multiple(plan.spec.score) is None else MOST_SUMS
    if plan.sums > room:
        out.append(f"{plan.warp_m} rows of a warp × ({plan.d_v} + {plan.warp_columns}) / 32 lanes = "
                   f"{plan.sums} sums a thread, at most {room}")
    return out
