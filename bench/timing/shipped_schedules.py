"""Writes tinygrad_nv/tile/shipped.json: the schedules that an H100 measured to be the best.

    python bench/timing/shipped_schedules.py

Rows are those of hardware_rows.json: schedules of a spec that took turns, and those that ran one after the
other where power did not limit the clock. Where it did, the same kernel took 0.93 to 1.40 times as long in
another order, which decides nothing. A paged decode has one schedule for any number of requests, whose best
ones differ: it keeps its default. Nothing is modelled: for matmuls the timing model orders schedules with a
rank correlation below 0.7 (docs/timing.md).
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS
from bench.timing.gate_cases import GPU_NAME
from bench.timing.hardware_rows import HardwareRow, load_rows, spec_of
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.tile import database
from tinygrad_nv.tile.spec_json import is_tuned
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

IN_TURNS = "c1444f77"       # the commit whose sweeps had all schedules in turns
BY_ALL_REQUESTS = ("paged",)
LIMITED_MHZ = 0.99          # of the highest clock


def sweeps() -> Iterator[Sequence[HardwareRow]]:
    """Yields the schedules of each spec that were timed together, those in turns first."""
    found = defaultdict[tuple[str, str, str], list[HardwareRow]](list)
    for row in load_rows():
        if row.sweep.startswith("schedules ") and row.part not in BY_ALL_REQUESTS:
            found[row.sweep_of_spec].append(row)
    yield from sorted(found.values(), key=lambda some: IN_TURNS not in some[0].sweep)


def read_clocks() -> dict[tuple[str, str], float]:
    """Returns the clocks that the timing model gives rows, in MHz, by spec and schedule: none was read."""
    rows = json.loads((RESULTS / "timing_hardware.json").read_text())["rows"]
    return {(row["spec"], row["schedule"]): row["clock_mhz"] for row in rows}


def is_limited(some: Sequence[HardwareRow], clocks: dict[tuple[str, str], float]) -> bool:
    """Whether power limits one of these kernels."""
    highest = figures(GPU_NAME).clock_hz / 1e6
    return any(clocks.get((row.spec, row.plan), highest) < LIMITED_MHZ * highest
               for row in some)


def entries() -> Iterator[database.Entry]:
    """Yields the winner of each spec."""
    named, clocks, done = figures(GPU_NAME), read_clocks(), set[str]()
    gpu = GPU(named.arch, named.sms, model=GPU_NAME)
    driver = json.loads((RESULTS / "schedules_h100-80gb-hbm3.json").read_text())["driver"]
    for some in sweeps():
        spec = database.tuning_key(spec_of(some[0]))
        commit, best = some[0].sweep.split()[-1], min(some, key=lambda row: row.us)
        limited = is_limited(some, clocks)
        if not is_tuned(spec) or str(spec) in done or len(some) < 2: continue
        if limited and commit != IN_TURNS: continue
        schedule = TABLE.read("gpu", best.schedule)
        if database.problems(spec, schedule, gpu): continue
        done.add(str(spec))
        yield database.Entry(spec, named.arch, database.toolchain(), schedule, best.us * 1e-6, "measured",
                             GPU_NAME, database.origin("an H100 SXM"), driver, commit, limited)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print only")
    given, made = parser.parse_args(), list(entries())
    if not given.dry: database.SHIPPED.write_text(database.dump(made))
    for each in made: print(f"{each.spec}: {each.schedule} ({each.seconds * 1e6:.1f} us)")


if __name__ == "__main__": main()
