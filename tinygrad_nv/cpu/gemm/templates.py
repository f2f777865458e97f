"""The templates of a matmul on a CPU: gemv/ (few rows), amx.py (AMX tiles), blocked/ (everything).

A schedule is chosen as tile/choose.py does it for GPUs: the winner that the schedule database has, else the
default (schedules.py); with BEAM=N the best of some that are tried (tune.py).
"""
from __future__ import annotations

from functools import lru_cache

from tinygrad.helpers import BEAM

from tinygrad_nv.cpu.gemm import amx
from tinygrad_nv.cpu.gemm.blocked import kernel as blocked
from tinygrad_nv.cpu.gemm.blocked.blocks import in_blocks, words
from tinygrad_nv.cpu.gemm.gemv import kernel as gemv
from tinygrad_nv.cpu.gemm.schedules import Amx, CPUGemm, CPUGemmSchedule, CPUGemv, default
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import Family

SHORT, NARROW = 8, 64  # sums of at most so many products, beside fewer rows or columns, are tinygrad's

GEMV = template(GemmSpec, CPUGemv, gemv.default, gemv.problems, gemv.__name__)
AMX = template(GemmSpec, Amx, amx.default, amx.problems, amx.__name__)
GEMM = template(GemmSpec, CPUGemm, blocked.default, blocked.problems, blocked.__name__)


def choose(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The schedule of a matmul; None when no template takes it."""
    if (known := database.lookup(spec, target.arch, target)) is not None: return known
    chosen = default(spec, target)
    if chosen is None or BEAM.value < 1: return chosen
    from tinygrad_nv.cpu.gemm.tune import search  # kernels are loaded by those who try
    return search(spec, target, BEAM.value) or chosen


def too_short(spec: GemmSpec) -> str:
    """Why a product is left to tinygrad although templates take it; "" where it is not. Each element costs
    them a prologue and an epilogue: 50000 x 4 x 4 take twice as long by gemv, 11764 x 17 x 8 1.7 times by
    gemm; 3125 x 64 of K = 2 to 8 half to as long."""
    if spec.k > SHORT or min(spec.m, spec.n) >= NARROW: return ""
    return f"K of {spec.k} with {min(spec.m, spec.n)} rows or columns, at least {SHORT + 1} or {NARROW}"


def _choose(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The schedule of a matmul; None too where tinygrad's own code is as fast."""
    return None if too_short(spec) else choose(spec, target)


@lru_cache(4096)
def _order_schedule(spec: GemmSpec, target: CPU) -> Ordered | None:
    """The blocked schedule, with blocks of k that rows do not change (blocked/blocks.py); None where the
    kernel does not take a matmul. gemv and AMX tiles add in other orders, and do not take all numbers of
    rows."""
    made = in_blocks(blocked.default(spec, target), spec, target)
    return None if blocked.problems(spec, made) else Ordered(made, words(made))


FAMILY = Family("gemm", (GEMV, AMX, GEMM), _choose, lambda spec, _: too_short(spec),
                determinism_class=_order_schedule)
