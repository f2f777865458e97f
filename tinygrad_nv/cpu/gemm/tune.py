"""The best of some schedules on this CPU, by the clock.

Protocol: `tune(spec, target, beam)` times what each template chooses by itself, then goes from the fastest
to the fastest `near` it until nothing near is faster or `PER_BEAM` · beam schedules were
tried. Each is compiled and called on operands that no cache holds: as many copies of them take turns as it
takes to fill the caches. The fastest few and the first default are timed once more, in turns, since a machine
is not equally fast all the time. The winner goes to the schedule database.

`search` is what BEAM=N does while a graph is made into kernels: `tune`, unless the database knows, with a bar
on the terminal.
"""
from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule, starts
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import NVError
from tinygrad_nv.progress import Progress, bar
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.spec import GemmSpec, sizes
from tinygrad_nv.tile.templates import TABLE

if TYPE_CHECKING:
    from tinygrad_nv.runtime.cpu.program import LoadedKernel

PER_BEAM, FINALISTS = 8, 3
BEYOND = 2                   # so many times the third cache are read before anything is read again
MOST_BYTES = 1 << 30         # of all copies of operands
FEWEST, MOST, ENOUGH_SECONDS = 3, 25, 0.05    # calls that are timed, and when it is enough of them
BETTER = 0.98                # of the time before: less is not told from noise
FILL = 0x3C                  # bytes that are ordinary numbers in every dtype


@dataclass(frozen=True)
class CPUCandidate:
    """A schedule that was tried; `seconds` None where it is out, and `why`."""
    schedule: CPUGemmSchedule
    seconds: float | None = None
    why: str = ""


def tune(spec: GemmSpec, target: CPU, beam: int = 1,
         progress: Progress = lambda done, count: None) -> list[CPUCandidate]:
    """Candidates, the fastest first, those that are out last; none where no template takes the product. The
    first is stored in the database. Raises `OSError` where that cannot be written."""
    arrays, tried = Arrays(spec, target), dict[CPUGemmSchedule, CPUCandidate]()
    most = PER_BEAM * beam

    def fastest(wanted: list[CPUGemmSchedule]) -> CPUCandidate | None:
        for s in wanted:
            if s in tried or len(tried) >= most: continue
            tried[s] = arrays.time_schedule(s)
            progress(len(tried), most)
        return min((c for c in tried.values() if c.seconds is not None), key=_seconds, default=None)

    best = fastest(starts(spec, target))
    while best is not None and len(tried) < most:
        found = fastest(near(spec, target, best.schedule))
        if found is None or _seconds(found) > BETTER * _seconds(best): break
        best = found
    ranked = _rank(tried)
    last = [c.schedule for c in ranked[:FINALISTS] if c.seconds is not None]
    last += [s for s in starts(spec, target)[:1] if s not in last and tried[s].seconds is not None]
    for s, seconds in zip(last, arrays.in_turns(last), strict=True): tried[s] = CPUCandidate(s, seconds)
    # who was not in the final is behind those who were
    ranked = _rank({s: tried[s] for s in last}) + [c for c in _rank(tried) if c.schedule not in last]
    if ranked and ranked[0].seconds is not None:
        database.store([database.Entry(spec, target.arch, database.toolchain("cpu"), ranked[0].schedule,
                                       ranked[0].seconds, "measured", origin=database.origin())])
    return ranked


def near(spec: GemmSpec, target: CPU, s: CPUGemmSchedule) -> list[CPUGemmSchedule]:
    """The legal schedules around one."""
    return [one for one in s.variants(spec, target) if not TABLE.problems(spec, one, target)]


def search(spec: GemmSpec, target: CPU, beam: int) -> CPUGemmSchedule | None:
    """The best schedule by `tune`; None where there is none. A database that cannot be written is noted."""
    try:
        with bar(f"trying schedules of {spec}") as progress: tried = tune(spec, target, beam, progress)
    except OSError as error:
        database.note(f"{database.path()} cannot be written: {error}")
        return None
    return tried[0].schedule if tried and tried[0].seconds is not None else None


def _rank(tried: dict[CPUGemmSchedule, CPUCandidate]) -> list[CPUCandidate]:
    return sorted(tried.values(), key=lambda c: (c.seconds is None, c.seconds or 0.0))


def _seconds(candidate: CPUCandidate) -> float:
    assert candidate.seconds is not None
    return candidate.seconds


class Arrays:
    """Copies of a product's operands, and a result for each."""

    def __init__(self, spec: GemmSpec, target: CPU) -> None:
        self.spec, self.target = spec, target
        every = sizes(spec)
        wanted = -(-BEYOND * target.l3_bytes // sum(every))
        copies = max(1, min(wanted, MOST_BYTES // sum(every)))
        self.copies = itertools.cycle([[np.full(nbytes, FILL, np.uint8) for nbytes in every]
                                       for _ in range(copies)])
        self.loaded: dict[CPUGemmSchedule, LoadedKernel] = {}

    def time_schedule(self, s: CPUGemmSchedule) -> CPUCandidate:
        """A candidate with its time, or why it is out."""
        from tinygrad_nv.runtime.cpu.program import load
        try: self.loaded[s] = load(TABLE.build(self.spec, s, self.target))
        except NVError as error: return CPUCandidate(s, why=error.found)
        return CPUCandidate(s, self.in_turns([s])[0])

    def in_turns(self, schedules: list[CPUGemmSchedule]) -> list[float]:
        """The median of some calls of each, one after the other, after one that is not counted."""
        times: list[list[float]] = [[] for _ in schedules]
        for _ in range(1 + MOST):
            for s, taken in zip(schedules, times, strict=True): taken.append(self._once(s))
            if all(len(taken) > FEWEST and sum(taken[1:]) > ENOUGH_SECONDS for taken in times): break
        return [statistics.median(taken[1:]) for taken in times]

    def _once(self, s: CPUGemmSchedule) -> float:
        run = self.loaded[s]
        out, *operands = next(self.copies)
        extra = [np.zeros(run.kernel.workspace_bytes, np.uint8)] if run.kernel.workspace_bytes else []
        rows = [self.spec.m] if self.spec.symbolic else []
        begun = time.perf_counter()
        run(out, *extra, *operands, *rows, threads=self.target.threads)
        return time.perf_counter() - begun
