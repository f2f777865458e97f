"""Legality of `flash_fma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.fma.plan import MOST_SUMS, FlashFmaPlan
from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, multiple
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.limits import MOST_GRID

COLUMNS = (8, 16, 32, 64)  # of a warp, in a block
MOST_BESIDE = 150          # sums, where scores are more than multiples of sums


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
