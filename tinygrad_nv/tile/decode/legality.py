"""Legality of `decode_attention`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.spec import MOST_HEAD, OPERANDS
from tinygrad_nv.tile.decode.columns import divide_columns
from tinygrad_nv.tile.decode.combine import MOST_SPLITS
from tinygrad_nv.tile.decode.plan import DecodePlan
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.limits import MOST_GRID

MOST_STRIDE = (1 << 31) - 1  # bytes that an instruction takes
MOST_TILE = 256              # keys of a block, of which addresses are constants away from the first


def problems(spec: DecodeSpec, schedule: Decode, arch: str) -> list[str]:
    """Why `decode_attention` cannot have this schedule; empty when it can."""
    if spec.q.dtype not in OPERANDS:
        kind = short(spec.q.dtype)
        return [f"q of {kind}, a result of {kind}, not one of {', '.join(map(short, OPERANDS))} for both"]
    spec = divide_columns(spec)
    s, plan = schedule, DecodePlan.of(spec, schedule)
    out = _spec_problems(spec) + epilogue.problems(spec.score, arch)
    if s.warps_m not in (1, 2, 4) or s.warps_n not in (1, 2, 4, 8):
        out.append(f"{s.warps_m}x{s.warps_n} warps are not 1, 2 or 4 along rows, 1, 2, 4 or 8 along keys")
    elif s.block_n & (s.block_n - 1) or plan.keys < 16:
        out.append(f"block_n={s.block_n} is not a power of 2, of {s.warps_n} warps × 16 keys at least")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.splits > MOST_SPLITS: out.append(f"{s.splits} splits, at most {MOST_SPLITS}")
    if not out and (needed := plan.smem_bytes) > (most := limits.SMEM_BYTES[arch]):
        out.append(f"{s.depth} stages × {plan.stage_bytes} B, or {plan.sums_bytes} B of sums; queries "
                   f"{plan.q_bytes} B; pages {plan.table_bytes} B: {needed} B of shared memory, {arch} has "
                   f"{most}")
    blocks = spec.heads * plan.row_blocks
    for name, count in (("requests", spec.batch), ("key heads × blocks of rows", blocks)):
        if count > MOST_GRID: out.append(f"{count} {name}, at most {MOST_GRID}")
    return out


def _spec_problems(spec: DecodeSpec) -> list[str]:
    """Returns the problems of the spec, whatever the schedule."""
    out, unit = [], 32 if spec.is_quantised else 16
    for name, extent in (("d", spec.d), ("d_v", spec.d_v)):
        if extent % unit: out.append(f"{name}={extent} is not a multiple of {unit}")
    if spec.d_v > MOST_HEAD:
        out.append(f"d_v={spec.d_v} of {spec.heads} key heads, at most {MOST_HEAD}: sums are in registers")
    for name, pages in (("keys", spec.k), ("values", spec.v)):
        if pages.alignment_bytes < 16:
            out.append(f"{name} begin at multiples of {pages.alignment_bytes} B, copies at multiples of 16")
        far = [("pages", pages.page)] if spec.table else [(f"{MOST_TILE} tokens", MOST_TILE * pages.token)]
        for what, stride in far:
            if (stride := stride * pages.dtype.itemsize) > MOST_STRIDE:
                out.append(f"{what} of {name} {stride} B apart, at most {MOST_STRIDE}")
    least = 8 if spec.is_quantised else 4
    if spec.q.alignment_bytes < least:
        out.append(f"rows of q begin at multiples of {spec.q.alignment_bytes} B, "
                                                f"loads at multiples of {least}")
    if spec.out.alignment_bytes < 4: out.append(f"rows of the result begin at multiples of "
                                              f"{spec.out.alignment_bytes} B, stores at multiples of 4")
    return out
