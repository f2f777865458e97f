"""The schedules there are for a matmul: all that legality accepts, of what is worth writing down.

Protocol: `starts(spec, gpu)` are those worth trying first, in the order of preference; `space(spec, gpu)`
yields legal schedules, each once, in a fixed order. What is left out on purpose: tiles more than twice as
large as the matmul, sums beside which ptxas spills a long epilogue, splits that make more CTAs than two for
each SM or sums of fewer than two steps, and rings other than those worth trying (schedules.py).
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def starts(spec: GemmSpec, gpu: GPU) -> list[GemmSchedule]:
    """Schedules to start from for a matmul, in the order of preference."""
    return [s for template in TABLE.templates("gpu", spec) for s in template.candidates(spec, gpu)]


def space(spec: GemmSpec, gpu: GPU) -> Iterator[GemmSchedule]:
    """Every legal schedule."""
    size, seen = spec.a.dtype.itemsize, set()
    sms = gpu_model_for(gpu.arch, gpu.sm_count).sm_count
    every = (template.schedule.every(gpu.arch, size) for template in TABLE.templates("gpu", spec))
    for tile in chain(starts(spec, gpu), *every):
        if not tile.worthwhile(spec): continue
        for deep in tile.stage_variants(gpu.arch, size):
            for schedule in deep.variants(spec, sms):
                if schedule in seen: continue
                seen.add(schedule)
                if not TABLE.problems(spec, schedule, gpu): yield schedule
