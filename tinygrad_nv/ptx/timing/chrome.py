"""A prediction as a trace of chrome://tracing and Perfetto: a row for each warp and each unit of an SM.

Protocol: `chrome(timing)` of a prediction that kept its issues (`log`). A warp's row has each instruction,
from when the one before was issued until it is itself: what took long waited for something. A unit's row has
the work that instructions gave it, one after the other; tensor cores and the SFU have one of each scheduler.
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.ptx.timing.job import Job
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.simulator import Run
from tinygrad_nv.ptx.timing.units import Unit

UNITS = {Unit.TENSOR: "tensor core", Unit.XU: "SFU", Unit.COPY: "TMA"}
UNIT_ROWS = 1000    # numbers of the units' rows, after those of warps


def chrome(timing: Timing) -> dict[str, object]:
    """The trace, as JSON has it; times in microseconds at the clock of the prediction."""
    per_cycle = 1e6 / timing.clock_hz
    events = [event for job, run in timing.recorded for event in (*_warps(timing, job, run, per_cycle),
                                                                  *_units(job, run, per_cycle))]
    return {"displayTimeUnit": "ns", "traceEvents": events,
            "otherData": {"gpu": timing.gpu, "predicted": "not measured"}}


def _warps(timing: Timing, job: Job, run: Run, per_cycle: float) -> Iterator[dict[str, object]]:
    warps, instructions = job.warps.tolist(), timing.code.instructions
    for number, (_, _, sm, _, cta, _, _) in enumerate(warps):
        yield _name_thread(sm, number, f"CTA {cta} warp {number}")
    for number, instr, issue, waited in run.log.tolist():
        if instr >= len(instructions): continue
        each = instructions[instr]
        yield {"name": each.opcode + each.modifiers, "ph": "X", "pid": warps[number][2], "tid": number,
               "ts": (issue - waited) * per_cycle, "dur": max(waited, 1) * per_cycle,
               "args": {"PTX line": each.ptx_line, "operands": each.operands}}


def _units(job: Job, run: Run, per_cycle: float) -> Iterator[dict[str, object]]:
    free: dict[tuple[int, int, int], int] = {}
    for number, instr, issue, _ in run.log.tolist():
        unit, row = Unit(int(job.instrs["unit"][instr])), job.warps[number]
        cycles = max(int(job.instrs["tensor"][instr]), int(job.instrs["busy"][instr]))
        if unit not in UNITS or cycles < 2: continue
        scheduler = 0 if unit is Unit.COPY else int(row["scheduler"])
        key = int(row["sm"]), int(unit), scheduler
        if key not in free: yield _name_thread(key[0], _row(key), f"{UNITS[unit]} {scheduler}")
        begin = max(issue, free.get(key, 0))
        free[key] = begin + cycles
        yield {"name": UNITS[unit], "ph": "X", "pid": key[0], "tid": _row(key), "ts": begin * per_cycle,
               "dur": cycles * per_cycle}


def _row(key: tuple[int, int, int]) -> int: return UNIT_ROWS + 8 * key[1] + key[2]


def _name_thread(sm: int, row: int, name: str) -> dict[str, object]:
    return {"name": "thread_name", "ph": "M", "pid": sm, "tid": row, "args": {"name": name}}
