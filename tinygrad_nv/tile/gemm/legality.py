"""What schedule can be, for a spec and an architecture, and why not.

Protocol: `problems` lists all that is wrong, with the arithmetic; templates refuse a schedule that has any
with a `ScheduleError` (`require`). Nothing else decides this. What each template asks is in its own
folder.
"""
from __future__ import annotations

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import MOST, SMEM_BYTES
from tinygrad_nv.tile.schedule import Schedule


def problems(schedule: Schedule, spec: GemmSpec, arch: str) -> list[str]:
    """Why the schedule's template cannot have it; empty when it can."""
    from tinygrad_nv.tile import epilogue
    from tinygrad_nv.tile.gemm.gemv import legality as legal_gemv
    from tinygrad_nv.tile.gemm.mma import legality as legal_mma
    from tinygrad_nv.tile.gemm.wgmma import legality as legal_wgmma
    s = schedule
    if arch not in SMEM_BYTES: return [f"{arch} is not {', '.join(SMEM_BYTES)}"]
    counts = (s.block_m, s.block_n, s.block_k, s.warps_m, s.warps_n, s.depth, s.cluster_m, s.cluster_n,
              s.splits, s.group)
    if min(counts) < 1: return [f"{s}: extents below 1"]
    own = {"mma": legal_mma, "wgmma": legal_wgmma, "gemv": legal_gemv}.get(s.template)
    if own is None: return [f"template {s.template!r} is not mma, wgmma or gemv"]
    return [*own.problems(schedule, spec, arch), *_count(schedule, spec),
            *epilogue.problems(spec.epilogue, arch)]


def _count(s: Schedule, spec: GemmSpec) -> list[str]:
    """Of what is numbered: rows and columns, elements of a sum, tiles, their parts with splits, their steps
    with stream-K."""
    extents = (("m", spec.m), ("n", spec.n), ("k", spec.k))
    if long := [f"{name}={extent} is above {MOST}" for name, extent in extents if extent > MOST]: return long
    m, n = (spec.n, spec.m) if s.swap else (spec.m, spec.n * spec.parts)
    tiles = -(-m // s.block_m) * -(-n // s.block_n) * spec.matrices
    name, pieces = ("steps", -(-spec.k // s.block_k)) if s.stream else ("parts", s.splits)
    if tiles * pieces <= MOST: return []
    words = f" × {pieces} {name}" if pieces > 1 else ""
    return [f"{tiles} tiles of {s.block_m} x {s.block_n}{words} are above {MOST}"]


def require(schedule: Schedule, spec: GemmSpec, arch: str) -> None:
    """Raises `ScheduleError` with all that is wrong."""
    if found := problems(schedule, spec, arch):
        raise ScheduleError(f"{schedule} cannot be: " + "; ".join(found), "a schedule without these problems",
                            "change the tile, the warps or the stages")
