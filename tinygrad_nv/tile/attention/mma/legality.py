"""Legality of `flash_mma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.mma.copy import LEAST_BYTES
from tinygrad_nv.tile.attention.mma.plan import FlashMmaPlan
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import OPERANDS, AttentionSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.limits import MOST_GRID

BLOCKS_N = (16, 32, 64, 128)
MOST_SUMS = 192      # registers for sums and probabilities, with fragments of q read each time


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
