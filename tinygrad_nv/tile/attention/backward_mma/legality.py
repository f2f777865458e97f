"""Legality of `flash_backward_mma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.backward_mma.plan import TILE_BYTES, BackwardMmaPlan
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec, dtype_problems
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.mma.copy import LEAST_BYTES
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, multiple
from tinygrad_nv.tile.limits import MOST_GRID

BLOCKS = (16, 32, 64, 128)
MOST_SUMS = 192     # registers for dk and dv, and for p and ds of a block
# the same, where scores are more than multiples of sums, or dropped, with turns, and where query heads of a
# group have windows
MOST_BESIDE = 160


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
