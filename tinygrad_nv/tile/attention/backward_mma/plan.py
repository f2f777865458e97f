"""Plan of `flash_backward_mma`, which follows from a spec and a schedule: extents and bytes. Numbers only.

Protocol: `BackwardMmaPlan.of` computes, and refuses nothing. `problems` and the kernel take their
arithmetic from here.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec, dtype_problems
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.mma.copy import LEAST_BYTES
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, Rows, multiple
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.spec import Result, StoreTarget
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.store_plan import StorePlan, store_plan, warp_tile

NUMBER_BYTES = 16   # of shared memory, for the number of a CTA
TILE_BYTES = 1024   # tiles are multiples of it: swizzled, they begin at such
BLOCKS = (16, 32, 64, 128)
MOST_SUMS = 192     # registers for dk and dv, and for p and ds of a block
# the same, where scores are more than multiples of sums, or dropped, with turns, and where query heads of a
# group have windows
MOST_BESIDE = 160


@dataclass(frozen=True)
class BackwardMmaPlan:
    """A backward pass by a schedule."""
    spec: BackwardSpec
    schedule: BackwardMma

    @staticmethod
    @lru_cache(1024)
    def of(spec: BackwardSpec, schedule: BackwardMma) -> BackwardMmaPlan:
        """The plan."""
        return BackwardMmaPlan(spec, schedule)

    def width(self, d: int) -> int:
        """Elements of a row of `d` in shared memory: each warp of those that share keys has whole steps of a
        product."""
        sharing = self.schedule.warps_n
        return -(-d // (16 * sharing)) * 16 * sharing

    @property
    def d(self) -> int:
        """Elements of a row of q and of keys in shared memory."""
        return self.width(self.spec.forward.d)

    @property
    def d_v(self) -> int:
        """Elements of a row of values and of the gradient in shared memory."""
        return self.width(self.spec.forward.d_v)

    @property
    def stage_bytes(self) -> int:
        """A block of rows of q and of the gradient, with −l · log2 e and −delta of each; whole TILE_BYTES."""
        nbytes = self.schedule.block_m * ((self.d + self.d_v) * 2 + 8)
        return -(-nbytes // TILE_BYTES) * TILE_BYTES

    @property
    def key_bytes(self) -> int:
        """The CTA's keys and values."""
        return self.schedule.block_n * (self.d + self.d_v) * 2

    @property
    def weight_bytes(self) -> int:
        """ds of a block; and p, where warps share keys."""
        return self.schedule.block_n * self.schedule.block_m * 2 * min(self.schedule.warps_n, 2)

    @cached_property
    def dq_warps(self) -> tuple[int, int] | None:
        """Warps along the rows and along d of a block of dq, of which a warp has as little as possible to
        read: 16 rows and 16 elements or multiples of them. None where warps cannot share it."""
        rows_of_block, warps = self.schedule.block_m, self.schedule.warps_m * self.schedule.warps_n
        found = [(rows_of_block // rows + self.d // (warps // rows), rows, warps // rows)
                 for rows in (1, 2, 4, 8, 16) if warps % rows == 0 and rows_of_block % (16 * rows) == 0
                 and self.d % (16 * (warps // rows)) == 0]
        return min(found)[1:] if found else None

    @property
    def sums(self) -> int:
        """Registers a thread that hold dk and dv, and sums and products with v of a block."""
        s = self.schedule
        return s.block_n // s.warps_m * (self.d + self.d_v + 2 * s.block_m) // (32 * s.warps_n)

    def store_target(self, rows: Rows, d: int) -> StoreTarget:
        """dk or dv, for its store."""
        one, out = self.spec.forward, Result(rows.dtype, rows.row, 1, rows.batch, rows.offset)
        return StoreTarget(out, one.s_kv, d, (*one.batch[:2], 1), Sum().cast(out.dtype),
                           "s_kv" in one.symbolic)

    def store(self, rows: Rows, d: int) -> StorePlan:
        """How dk or dv is stored: element by element where warps share keys, as each has parts of lines."""
        s = self.schedule
        plan = store_plan(self.store_target(rows, d), warp_tile(s.block_n, self.width(d), s.warps_m))
        return plan if s.warps_n == 1 else replace(plan, panel=None, smem_bytes=0)

    @cached_property
    def memory_bytes(self) -> int:
        """The keys, the ring, ds; dk and dv are stored from where all this was."""
        spec, one = self.spec, self.spec.forward
        loop = self.key_bytes + self.schedule.depth * self.stage_bytes + self.weight_bytes
        return max(loop, sum(self.store(rows, d).smem_bytes for rows, d in ((spec.dk, one.d),
                                                                            (spec.dv, one.d_v))))

    @property
    def smem_bytes(self) -> int:
        """Shared memory: the same, and the number of a CTA that takes turns."""
        return self.memory_bytes + (NUMBER_BYTES if self.spec.deterministic else 0)


def problems(spec: BackwardSpec, schedule: BackwardMma, arch: str) -> list[str]:
    """Why `flash_backward_mma` cannot have this schedule; empty when it can."""
    s, out = schedule, _spec_problems(spec)
    if s.block_n % (16 * s.warps_m):
        out.append(f"block_n={s.block_n} is not a multiple of {s.warps_m} warps × 16 = {16 * s.warps_m}")
    out += [f"{name}={block} is not {', '.join(map(str, BLOCKS))}"
            for name, block in (("block_m", s.block_m), ("block_n", s.block_n)) if block not in BLOCKS]
    out += [f"{warps} warps {of} are not 1, 2, 4 or 8" for warps, of in
            ((s.warps_m, "of keys"), (s.warps_n, "that share keys")) if warps not in (1, 2, 4, 8)]
    if s.block_m % (16 * s.warps_n):
        out.append(f"block_m={s.block_m} is not a multiple of {s.warps_n} warps × 16 = {16 * s.warps_n}")
    if s.threads < s.block_m:
        out.append(f"block_m={s.block_m} is above {s.threads} threads, one for each row")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out or [*_resource_problems(BackwardMmaPlan.of(spec, s), arch),
                   *epilogue.problems(spec.forward.score, arch)]


def _spec_problems(spec: BackwardSpec) -> list[str]:
    """Returns the problems of the operands, whatever the schedule; and of a score without a derivative."""
    if words := dtype_problems(spec): return words
    one = spec.forward
    try: derivative(one.score)
    except SpecError as error: return [str(error.found)]
    out = [f"{name}={d} is not a multiple of 8" for name, d in (("d", one.d), ("d_v", one.d_v)) if d % 8]
    out += [f"rows of {name} are aligned to {rows.alignment_bytes} B, cp.async copies {LEAST_BYTES} and more"
            for name, rows in (("q", one.q), ("k", one.k), ("v", one.v), ("grad", spec.grad))
            if rows.alignment_bytes < LEAST_BYTES]
    return out + [f"{count} {name} are above {MOST_GRID}, a grid's" for name, count in
                  (("key heads", one.batch[1]), ("batches", one.batch[0])) if count > MOST_GRID]


def _resource_problems(plan: BackwardMmaPlan, arch: str) -> list[str]:
    s, one, out, most = plan.schedule, plan.spec.forward, [], limits.SMEM_BYTES[arch]
    if plan.smem_bytes > most:
        out.append(f"keys of {plan.key_bytes} B, {s.depth} stages × {plan.stage_bytes} B and ds are "
                   f"{plan.smem_bytes} B of shared memory, {arch} has {most}")
    beside = (multiple(one.score) is None, one.kept < KEEP_ALL, plan.spec.deterministic,
              one.batch[2] > 1 and one.band.first is not None)
    room = MOST_BESIDE if any(beside) else MOST_SUMS
    if plan.sums > room:
        out.append(f"{s.block_n // s.warps_m} keys of a warp × ({plan.d} + {plan.d_v} + 2 × {s.block_m}) / "
                   f"32 lanes / {s.warps_n} that share them = {plan.sums} sums a thread, at most {room}")
    out += [f"a tile of {rows} rows x {wide} elements is not a multiple of {TILE_BYTES} B"
            for rows in (s.block_m, s.block_n) for wide in sorted({plan.d, plan.d_v})
            if rows * wide * 2 % TILE_BYTES]
    if plan.dq_warps is None:
        out.append(f"{s.warps_m * s.warps_n} warps cannot share {s.block_m} rows x {plan.d} of dq by 16 x 16")
    return out
