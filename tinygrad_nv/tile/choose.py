"""Which schedule a product gets, or why none.

Protocol: `choose` is a function of spec and architecture alone: the same schedule in every process. None
means that no template takes the product, and `why_not` says why in words for a reader.
"""
from __future__ import annotations

import functools

from tinygrad_nv.tile.legality import problems
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec

CANDIDATES = (
    Schedule().using("wgmma").block(128, 256), Schedule().using("wgmma").block(128, 128),
    Schedule().using("wgmma").block(64, 64).warps(8),
    Schedule().block(128, 128).k(32).warps(2, 2).stages(3), Schedule().block(64, 64).k(32).warps(2, 2),
    Schedule().block(32, 64).k(32).warps(1, 2), Schedule().block(16, 64).k(32).warps(1, 2),
    Schedule().block(32, 32).k(32).warps(1, 1), Schedule().using("gemv"))


@functools.lru_cache(4096)
def choose(spec: GemmSpec, arch: str, sm_count: int = 132) -> Schedule | None:
    """The schedule for a product on a GPU with `sm_count` SMs; None when there is none."""
    legal = [s for s in CANDIDATES if not problems(s, spec, arch)]
    return min(legal, key=lambda s: -(-spec.m // s.block_m) * s.block_m * -(-spec.n // s.block_n) * s.block_n,
               default=None)


def why_not(spec: GemmSpec, arch: str) -> str:
    """Why `choose` finds nothing: what each template says of the schedule it likes best; "" when it does."""
    if choose(spec, arch) is not None: return ""
    said: dict[str, list[str]] = {}
    for s in CANDIDATES:
        found = problems(s, spec, arch)
        if s.template not in said or len(found) < len(said[s.template]): said[s.template] = found
    return "; ".join(f"{template}: {', '.join(found)}" for template, found in said.items())
