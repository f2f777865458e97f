"""How long a program takes.

Protocol: `seconds(program, schedule, target)` is the median of some runs on a CPU or a GPU ("measured"), and
on the emulator what the timing model says ("modelled"). Operands are zeros.
"""
from __future__ import annotations

import time
from typing import Any

import numpy as np

from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.language.building import build
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.tile.clock import How
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule

WARM, TIMED, LONG = 1, 5, 0.2      # calls; seconds after which no more are made


def seconds(program: Program, schedule: TileSchedule, target: Target) -> tuple[float, How]:
    """The time, and how it is known. Raises `ScheduleError` where a program cannot be built or timed."""
    made = build(program, schedule, target)
    if isinstance(target, CPU): return _on_cpu(program, made), "measured"
    from tinygrad_nv.tile.emulated import clock_of
    if (clock := target.clock or clock_of(target)) is None:
        raise ScheduleError(f"no time of {program.name}: the timing model needs ptxas and nvdisasm",
                            "a GPU, or these programs", "pip install 'tinygrad-nv[emulator]'")
    return clock.seconds(made, program), clock.how


def _on_cpu(program: Program, made: Any) -> float:
    from tinygrad_nv.runtime.cpu.program import load
    loaded = load(made)
    arrays = [np.zeros(max(1, each.numel) * each.dtype.itemsize, np.uint8) for each in program.tensors]
    times = list[float]()
    for number in range(WARM + TIMED):
        begun = time.perf_counter()
        loaded(*arrays)
        if number >= WARM: times.append(time.perf_counter() - begun)
        if times and sum(times) > LONG: break
    return float(np.median(times))
