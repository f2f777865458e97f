"""Legality of a matmul's schedules: which it can have, and why not.

Protocol: what each template asks of its own fields is in its folder, what all ask is here.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.template import GPU, legality

C = TypeVar("C", bound=GemmSchedule)
S = TypeVar("S", bound=GemmSpec)


def whole(own: Callable[[S, C, str], Sequence[str]]) -> Callable[[S, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can."""
    def find_problems(spec: S, s: C, arch: str) -> tuple[str, ...]:
        return (*own(spec, s, arch), *_count(spec, s), *_epilogue(spec, arch))
    return legality(find_problems)


@lru_cache(4096)
def _epilogue(spec: GemmSpec, arch: str) -> tuple[str, ...]:
    return tuple(epilogue.problems(spec.epilogue, arch))


def _count(spec: GemmSpec, s: GemmSchedule) -> list[str]:
    """Returns the problems of what is numbered: rows and columns, elements of a sum, tiles, their parts with
    splits, their steps with stream-K."""
    extents = (("m", spec.m), ("n", spec.n), ("k", spec.k))
    if long := [f"{name}={extent} is above {MOST}" for name, extent in extents if extent > MOST]: return long
    m, n = (spec.n, spec.m) if s.swap else (spec.m, spec.n * spec.parts)
    tile = s.tile(spec)
    tiles = -(-m // tile.rows) * -(-n // tile.width) * spec.matrices
    name, pieces = ("steps", -(-spec.k // s.block_k)) if s.stream else ("parts", s.splits)
    if tiles * pieces <= MOST: return []
    words = f" × {pieces} {name}" if pieces > 1 else ""
    return [f"{tiles} tiles of {tile.rows} x {tile.width}{words} are above {MOST}"]
