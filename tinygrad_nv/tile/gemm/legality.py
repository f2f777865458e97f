"""What schedule can be, for a spec and an architecture, and why not.

Protocol: what each template asks of its own fields is in its folder, what all ask is here. `whole` joins the
two to a template's `problems`: all that is wrong, with the arithmetic, remembered for those who ask again.
Templates refuse a schedule that has any with a `ScheduleError` (`require`). Nothing else decides this.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import MOST, SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

C = TypeVar("C", bound=GemmSchedule)
Words = tuple[str, ...]


def whole(own: Callable[[GemmSpec, C, str], Sequence[str]]) -> Callable[[GemmSpec, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can. Remembered: a schedule that was chosen is
    asked about once more when its kernel is built, and whenever the database gives it."""
    @lru_cache(4096)
    def found(spec: GemmSpec, s: C, arch: str) -> Words:
        if arch not in SMEM_BYTES: return (f"{arch} is not {', '.join(SMEM_BYTES)}",)
        if min(n for n in vars(s).values() if type(n) is int) < 1: return (f"{s}: extents below 1",)
        return (*own(spec, s, arch), *_count(spec, s), *_epilogue(spec, arch))

    def problems(spec: GemmSpec, s: C, gpu: GPU) -> list[str]: return [*found(spec, s, gpu.arch)]
    return problems


@lru_cache(4096)
def _epilogue(spec: GemmSpec, arch: str) -> Words: return tuple(epilogue.problems(spec.epilogue, arch))


def _count(spec: GemmSpec, s: GemmSchedule) -> list[str]:
    """Of what is numbered: rows and columns, elements of a sum, tiles, their parts with splits, their steps
    with stream-K."""
    extents = (("m", spec.m), ("n", spec.n), ("k", spec.k))
    if long := [f"{name}={extent} is above {MOST}" for name, extent in extents if extent > MOST]: return long
    m, n = (spec.n, spec.m) if s.swap else (spec.m, spec.n * spec.parts)
    tile = s.tile(spec)
    tiles = -(-m // tile.rows) * -(-n // tile.width) * spec.matrices
    name, pieces = ("steps", -(-spec.k // s.block_k)) if s.stream else ("parts", s.splits)
    if tiles * pieces <= MOST: return []
    words = f" × {pieces} {name}" if pieces > 1 else ""
    return [f"{tiles} tiles of {tile.rows} x {tile.width}{words} are above {MOST}"]


def require(spec: GemmSpec, schedule: GemmSchedule, gpu: GPU) -> None:
    """Raises `ScheduleError` with all that is wrong."""
    if found := TABLE.problems(spec, schedule, gpu):
        raise ScheduleError(f"{schedule} cannot be: " + "; ".join(found), "a schedule without these problems",
                            "change the tile, the warps or the stages")
