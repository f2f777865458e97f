"""Legality of schedules, for a spec and an architecture, and why not: what all templates ask.

Protocol: what each template asks of its own fields is in its folder. `legality` joins the two to a template's
`problems`: all that is wrong, with the arithmetic, remembered for those who ask again. Nothing else decides.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

S = TypeVar("S")
C = TypeVar("C", bound=Schedule)


def legality(own: Callable[[S, C, str], Iterable[str]]) -> Callable[[S, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can. Remembered: a schedule that was chosen is
    asked about once more when its kernel is built, and whenever the database gives it."""
    @lru_cache(4096)
    def find_problems(spec: S, s: C, arch: str) -> tuple[str, ...]:
        if arch not in SMEM_BYTES: return (f"{arch} is not {', '.join(SMEM_BYTES)}",)
        if min((n for n in vars(s).values() if type(n) is int), default=1) < 1:
            return (f"{s}: extents below 1",)
        return tuple(own(spec, s, arch))

    def problems(spec: S, s: C, gpu: GPU) -> list[str]: return [*find_problems(spec, s, gpu.arch)]
    return problems
