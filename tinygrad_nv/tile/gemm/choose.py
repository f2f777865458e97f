"""Chooses the schedule of a matmul, or says why there is none.

Protocol: `choose` takes the winner that the schedule database has, else what the cost model says
(analytic.py). None means that no template takes the matmul, and `why_not` says why in words for a reader.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.helpers import BEAM

from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.candidates import starts
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def choose(spec: GemmSpec, gpu: GPU) -> GemmSchedule | None:
    """The schedule for a matmul; None when there is none. With BEAM=N candidates are tried, by the clock of
    `gpu`, or counted by the emulator."""
    if (known := database.lookup(spec, gpu.arch)) is not None: return known
    chosen = analytic(spec, gpu.arch, gpu.sm_count)
    if chosen is None or BEAM.value < 1: return chosen
    from tinygrad_nv.tile.gemm.tune import search  # the emulator is loaded only for tuning
    return search(spec, gpu.arch, BEAM.value, gpu.sm_count, gpu.clock) or chosen


def why_not(spec: GemmSpec, gpu: GPU) -> str:
    """Why `choose` finds nothing: what each template says of the schedule it likes best; "" when it does."""
    if analytic(spec, gpu.arch) is not None: return ""
    if gpu.arch not in SMEM_BYTES: return TABLE.problems(spec, Gemv(), gpu)[0]
    said: dict[str, Sequence[str]] = {}
    for s in (*starts(spec, gpu), Gemv()):  # gemv has none for many rows
        found = TABLE.problems(spec, s, gpu)
        if s.template not in said or len(found) < len(said[s.template]): said[s.template] = found
    return "; ".join(f"{template}: {', '.join(found)}" for template, found in said.items())
