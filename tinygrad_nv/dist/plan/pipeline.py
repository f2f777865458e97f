"""Pipeline schedules: how long stages wait, and how many microbatches they keep.

Protocol: of p stages and m microbatches, whose forward and backward pass take one and two units in a stage,
`idle` is the time that a stage waits in a step, in microbatches, `bubble` its share of the step, and
`under_way` how many microbatches' activations a stage holds. All three are counted on the schedules that
ranks run (dist/train/schedules.py), by what runs them on paper (dist/train/check.py). Of four stages and
eight microbatches:

    gpipe         waits 3      keeps 8, 8, 8, 8 microbatches
    1f1b          3            4, 3, 2, 1
    interleaved   3 / 2        5.5, 4.5, 3.5, 2.5, with two chunks a stage
    zero-bubble   3 / 3        4, 4, 4, 4

Beyond two microbatches a stage, none waits longer or, but for gpipe, keeps more: no more are counted.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from tinygrad_nv.dist.plan.layout import Training
from tinygrad_nv.dist.train.check import EVEN, Report, check
from tinygrad_nv.dist.train.schedules import Schedule, gpipe, interleave, one_f_one_b, zero_bubble_h1

COUNTED = 2     # microbatches of each stage
PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "zero-bubble": zero_bubble_h1}


@lru_cache(1024)
def report(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> Report:
    """A schedule on paper. Raises `DistError` for microbatches that an interleaved one cannot have."""
    return check(interleave(stages, microbatches, virtual) if schedule == "interleaved" else
                 PLAIN[schedule](stages, microbatches), EVEN)


def idle(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Microbatches' time that a stage waits in a step."""
    counted = min(microbatches, COUNTED * stages)
    return report(schedule, stages, counted, virtual).makespan / (sum(EVEN.values()) * virtual) - counted


def bubble(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Share of a step."""
    waits = idle(schedule, stages, microbatches, virtual)
    return waits / (microbatches + waits)


def under_way(work: Training, stages: int, stage: int, microbatches: int) -> float:
    """Microbatches whose activations a stage holds at most."""
    if work.schedule == "gpipe": return microbatches
    counted = min(microbatches, COUNTED * stages)
    return report(work.schedule, stages, counted, work.virtual).kept[stage] / work.virtual
