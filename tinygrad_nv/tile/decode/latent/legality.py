"""Legality of `latent_wgmma`: what it asks of a spec and a schedule."""
from __future__ import annotations

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.spec import OPERANDS
from tinygrad_nv.tile.decode.combine import MOST_SPLITS
from tinygrad_nv.tile.decode.latent.plan import COLUMN, CONSUMERS, LatentPlan
from tinygrad_nv.tile.decode.legality import MOST_STRIDE
from tinygrad_nv.tile.decode.schedules import LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import loads, short
from tinygrad_nv.tile.limits import SMEM_BYTES

BLOCKS = (32, 64, 128)          # keys of a tile
MOST_VALUES = CONSUMERS * 256   # elements: a wgmma has 256 columns
MOST_REQUESTS = 512             # 16 of a lane that counts


def problems(spec: DecodeSpec, schedule: LatentWgmma, arch: str) -> list[str]:
    """Why `latent_wgmma` cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"{arch} has no wgmma"]
    if not spec.latent: return ["values of their own memory: no latents"]
    s, plan = schedule, LatentPlan.of(spec, schedule)
    out = _spec_problems(spec, plan) + epilogue.problems(spec.score, arch)
    if s.block_n not in BLOCKS: out.append(f"{s.block_n} keys of a tile, not {', '.join(map(str, BLOCKS))}")
    if s.depth < 2: out.append(f"{s.depth} stage is not 2 or more")
    if s.splits > MOST_SPLITS: out.append(f"{s.splits} splits, at most {MOST_SPLITS}")
    if not out and (needed := plan.smem_bytes) > (most := SMEM_BYTES[arch]):
        out.append(f"queries {plan.queries.nbytes} B, {s.depth} stages × {plan.keys.nbytes} B, weights "
                   f"{plan.weights.nbytes} B: {needed} B of shared memory, {arch} has {most}")
    if spec.batch > MOST_REQUESTS: out.append(f"{spec.batch} requests, at most {MOST_REQUESTS}")
    return out


def _spec_problems(spec: DecodeSpec, plan: LatentPlan) -> list[str]:
    """Returns the problems of the spec, whatever the schedule."""
    out = []
    if spec.q.dtype not in OPERANDS:
        out.append(f"q of {short(spec.q.dtype)}, not one of {', '.join(map(short, OPERANDS))}")
    if not spec.table or loads(spec.score): out.append("keys without a table, or a score that reads memory")
    if spec.heads > 1 and spec.v.head != spec.k.head: out.append("values of another key head's latents")
    for name, extent, unit in (("d", spec.d, COLUMN), ("d_v", spec.d_v, CONSUMERS * COLUMN),
                               ("the beginning of values", plan.values_at, COLUMN)):
        if extent % unit: out.append(f"{name}={extent} is not a multiple of {unit}")
    if not 0 <= plan.values_at <= spec.d - spec.d_v: out.append("values beside their keys")
    if spec.d_v > MOST_VALUES: out.append(f"d_v={spec.d_v}, at most {MOST_VALUES}: sums are in registers")
    for name, aligned in (("latents", spec.k.alignment_bytes), ("rows of q", spec.q.alignment_bytes)):
        if aligned < 16: out.append(f"{name} begin at multiples of {aligned} B, copies at multiples of 16")
    if (far := spec.k.page * spec.k.dtype.itemsize) > MOST_STRIDE:
        out.append(f"pages {far} B apart, at most {MOST_STRIDE}")
    if spec.out.alignment_bytes < 4:
        out.append(f"rows of the result begin at multiples of {spec.out.alignment_bytes} B, stores at "
                   "multiples of 4")
    return out
