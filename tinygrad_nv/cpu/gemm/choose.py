"""Chooses the schedule of a matmul on a CPU, or says why there is none.

Protocol: as tile/choose.py for GPUs: the winner that the schedule database has, else the
default (defaults.py); with BEAM=N the best of some that are tried (tune.py).
"""
from __future__ import annotations

from tinygrad.helpers import BEAM

from tinygrad_nv.cpu.gemm.defaults import default
from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.spec import GemmSpec

SHORT, NARROW = 8, 64  # sums of at most so many products, beside fewer rows or columns, are tinygrad's


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
