"""Which schedule a matmul gets on a CPU, or why none.

Protocol: as tile/gemm/choose.py for GPUs: the winner that the schedule database has, else the first of
`starts`, what templates choose by themselves; with BEAM=N the best of some that are tried (tune.py).
"""
from __future__ import annotations

from functools import lru_cache

from tinygrad.helpers import BEAM

from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.spec import BYTES, GemmSpec
from tinygrad_nv.tile.template import AnyTemplate
from tinygrad_nv.tile.templates import TABLE

SHORT, NARROW = 8, 64  # sums of at most so many products, beside fewer rows or columns, are tinygrad's
FEWEST_BY_FOURS = 5    # rows of bytes that are not for gemv


def choose(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The schedule of a matmul; None when no template takes it."""
    if (known := database.lookup(spec, target.arch, target)) is not None: return known
    chosen = default(spec, target)
    if chosen is None or BEAM.value < 1: return chosen
    from tinygrad_nv.cpu.gemm.tune import search  # kernels are loaded by those who try
    return search(spec, target, BEAM.value) or chosen


@lru_cache(4096)
def default(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The schedule where nobody has tried others; None when no template takes the matmul."""
    return next(iter(starts(spec, target)), None)


def starts(spec: GemmSpec, target: CPU) -> list[CPUGemmSchedule]:
    """What each template that takes a matmul chooses by itself, the fastest first."""
    return [s for template in _preferred(spec, target) for s in template.candidates(spec, target)
            if not template.problems(spec, s, target)]


def _preferred(spec: GemmSpec, target: CPU) -> tuple[AnyTemplate, ...]:
    """Templates, the fastest first. On Zen 4 gemv is for all of its 16 rows, but not of bytes, of which gemm
    multiplies four at once: 16 rows by 4096 x 2048 take 2.1 ms, 4.5 by gemv; 4 rows the same."""
    by_fours = spec.a.dtype in BYTES and target.isa.vnni and min(spec.m, spec.n) >= FEWEST_BY_FOURS
    gemv, *others = TABLE.templates(target.kind, spec)
    return (*others, gemv) if by_fours else (gemv, *others)


def too_short(spec: GemmSpec) -> str:
    """Why a product is left to tinygrad although templates take it; "" where it is not. Each element costs
    them a prologue and an epilogue: 50000 x 4 x 4 take twice as long by gemv, 11764 x 17 x 8 1.7 times by
    gemm; 3125 x 64 of K = 2 to 8 half to as long."""
    if spec.k > SHORT or min(spec.m, spec.n) >= NARROW: return ""
    return f"K of {spec.k} with {min(spec.m, spec.n)} rows or columns, at least {SHORT + 1} or {NARROW}"
