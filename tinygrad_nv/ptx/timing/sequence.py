"""Launches one after the other: a decode step as a graph, with PDL or without, or a kernel timed in a loop.

Protocol: `in_row(timings, gpu)` says when each launch runs, from the predictions of each by itself, whose
`seconds` are those of a launch alone. A kernel begins `gap_s` after the one before it has ended. With PDL it
begins `pdl_gap_s` after the one before lets it (griddepcontrol.launch_dependents), if there is room beside
it, runs up to its first griddepcontrol.wait, and goes on as long after the one before has ended. Launches of
a graph come as fast as that; of a stream, the host submits one in `submit_s`.

What a prediction by itself takes from HBM it may find in L2 behind another kernel: that is not seen.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.shape import Shape
from tinygrad_nv.ptx.timing.simulator import run

WAIT, TRIGGER = "ACQBULK", "PREEXIT"    # griddepcontrol.wait and launch_dependents in SASS


@dataclass(frozen=True)
class Launched:
    """When a launch of a row begins and ends, in seconds from the beginning of the first; `hidden_s`: what it
    ran while the one before it did."""
    begin_s: float
    end_s: float
    hidden_s: float


@dataclass(frozen=True)
class Marks:
    """Moments of a kernel: seconds that it runs, from its beginning to the first wait for the kernel before,
    and from where it lets the next one begin to its end. Without such a wait: None."""
    run_s: float
    until_wait_s: float | None
    after_trigger_s: float


def in_row(timings: Sequence[Timing], gpu: GPUFigures, pdl: bool = False,
           graph: bool = True) -> tuple[Launched, ...]:
    """When each of a row of launches runs, as nodes of a graph or as launches of a stream."""
    out: list[Launched] = []
    before: tuple[Shape, Marks] | None = None
    for number, timing in enumerate(timings):
        mine = marks(timing, gpu) if pdl else Marks(timing.cycles / timing.clock_hz, None, 0.0)
        submitted = 0.0 if graph else number * gpu.submit_s
        if before is None: out.append(Launched(0.0, mine.run_s, 0.0))
        else: out.append(_next(out[-1], *before, timing.shape, mine, gpu, submitted))
        before = timing.shape, mine
    return tuple(out)


def seconds(row: Sequence[Launched], gpu: GPUFigures) -> float:
    """From the launch of the first to the end of the last."""
    return gpu.launch_s + row[-1].end_s


def seconds_of_each(timing: Timing, gpu: GPUFigures, graph: bool = False) -> float:
    """Returns the seconds for each of many launches of one kernel in a row, as benchmarks count them."""
    each = gpu.gap_s + timing.cycles / timing.clock_hz
    return each if graph else max(each, gpu.submit_s)


def marks(timing: Timing, gpu: GPUFigures) -> Marks:
    """From the recorded CTAs at the beginning of the grid, whose tail stands for that of the last ones."""
    job, _ = timing.recorded[0]
    ran = run(job, gpu, timing.shape.busy_sms(gpu), len(job.steps))
    opcodes = np.array([*(each.opcode for each in timing.code.instructions), ""])
    warps, instrs, issued = ran.log[:, 0], ran.log[:, 1], ran.log[:, 2]
    first = job.warps["after"][warps] < 0
    waits = issued[(opcodes[instrs] == WAIT) & first]
    triggers = issued[opcodes[instrs] == TRIGGER]
    cycle = 1 / timing.clock_hz
    return Marks(timing.cycles * cycle, float(waits.min()) * cycle if len(waits) else None,
                 float(ran.cycles - triggers.max()) * cycle if len(triggers) else 0.0)


def _next(last: Launched, shape: Shape, before: Marks, own: Shape, mine: Marks, gpu: GPUFigures,
          submitted: float) -> Launched:
    if mine.until_wait_s is None:
        begin = max(last.end_s, submitted) + gpu.gap_s
        return Launched(begin, begin + mine.run_s, 0.0)
    begin = max(last.end_s - before.after_trigger_s, submitted) + gpu.pdl_gap_s
    if not own.fits_beside(shape, gpu): begin = max(begin, last.end_s)
    goes_on = max(begin + mine.until_wait_s, last.end_s + gpu.pdl_gap_s)
    hidden = min(mine.until_wait_s, max(0.0, last.end_s - begin))
    return Launched(begin, goes_on + mine.run_s - mine.until_wait_s, hidden)

