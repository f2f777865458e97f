"""Processor time of tests: recorded for each file, printed for each folder, and held to a budget.

Protocol: `Durations` is a plugin of pytest, which tests/conftest.py registers. Every process that runs tests
notes in each report what the phase took: seconds of the process, of its children that have ended, and of
its workers that have not. The process that prints adds them up, sets the exit status where a folder took
more than its budget, and writes tests/durations.json with `--store-durations`, which `pick_shard` reads.
`python -m tests.support.durations` makes these the budgets.

Time of the clock would fail a test on a machine that is busy. Processor time hardly depends on that, but on
the processor: a budget is multiplied by what a fixed loop takes here, before and after the tests, over what
it took where the budgets were measured, and by `headroom`. Tests that are slow are not counted.
"""
from __future__ import annotations

import json
import math
import multiprocessing.process as processes
import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parents[1]
DURATIONS, BUDGETS = HERE / "durations.json", HERE / "budgets.toml"
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
SLOWER = float(os.environ.get("TEST_TIME_FACTOR", "1"))     # what sanitizers cost: .ci/nightly
PRINTED = 60.0      # seconds: a shorter run prints nothing


def processor_seconds() -> float:
    """Returns what this process, its children that have ended and its workers have used so far."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system + sum(
        _worker_seconds(each.pid) for each in list(getattr(processes, "_children", ())))


def _worker_seconds(pid: int | None) -> float:
    try: text = Path(f"/proc/{pid}/stat").read_text()
    except OSError: return 0.0
    return sum(map(int, text.rpartition(")")[2].split()[11:15])) / TICK


def loop_seconds() -> float:
    """Returns the processor time of a fixed piece of work: the best of three."""
    took = []
    for _ in range(3):
        start, total = time.process_time(), 0
        for number in range(1_000_000): total += number & 7
        took.append(time.process_time() - start)
    return min(took)


def folder_of(file: str) -> str:
    """Returns the folder that has a budget: two levels below tests/, as `unit/cpu`."""
    return "/".join(file.split("/")[1:-1][:2]) or "."


def exceeded(spent: Mapping[str, float], budgets: Mapping[str, Any], loop: float) -> list[str]:
    """Says which folders took more than their budgets, of budgets.toml; `loop` is what the loop takes."""
    factor = budgets["headroom"] * max(1.0, loop / budgets["loop"]) * SLOWER
    found = []
    for folder, seconds in sorted(spent.items()):
        budget = budgets["seconds"].get(folder, budgets["other"])
        if seconds > budget * factor:
            found.append(f"tests/{folder} took {seconds:.0f} s of processor time, and may take "
                         f"{budget * factor:.0f} here: {budget} s of tests/budgets.toml, times {factor:.1f}")
    return found


def pick_shard(files: Iterable[str], part: str, seconds: Mapping[str, float]) -> set[str]:
    """Returns the files of part i of n (`i/n`, from 1): the longest first, each to the part with least."""
    number, parts = map(int, part.split("/"))
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--shard {part}: the first number is 1 to the second")
    spent, mine = [0.0] * parts, set()
    for file in sorted(set(files), key=lambda each: (-seconds.get(each, 1.0), each)):
        least = min(range(parts), key=spent.__getitem__)
        spent[least] += seconds.get(file, 1.0)
        if least == number - 1: mine.add(file)
    return mine


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Returns the seconds of each file."""
    return json.loads(path.read_text()) if path.exists() else {}


def budgets_of(files: Mapping[str, float], loop: float) -> str:
    """Returns the text of budgets.toml for what was measured: at least 5 s a folder."""
    spent = sum_folders(files)
    return "\n".join([
        "# Processor seconds that the tests of a folder may take, as measured with nothing compiled before:",
        "# tests/support/durations.py says by what they are multiplied, and writes this file.",
        "headroom = 2.0",
        f"loop = {loop:.3f}     # seconds of that module's loop on the machine of the measurement",
        "other = 60", "[seconds]",
        *(f'"{folder}" = {max(5, math.ceil(spent[folder]))}' for folder in sorted(spent)), ""])


def sum_folders(files: Mapping[str, float]) -> Counter[str]:
    """Returns the seconds of each folder."""
    spent: Counter[str] = Counter()
    for file, seconds in files.items(): spent[folder_of(file)] += seconds
    return spent


class Durations:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.printing = config, not hasattr(config, "workerinput")
        self.files: Counter[str] = Counter()
        self.before = self.loop = loop_seconds() if self.printing else 0.0

    def pytest_runtest_logstart(self) -> None: self.before = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Notes in the report what the phase took."""
        report = yield
        now = processor_seconds()
        if not item.get_closest_marker("slow"): report.processor_seconds = round(now - self.before, 4)
        self.before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up; under xdist reports arrive here a second time, in the process that prints."""
        self.files[report.nodeid.partition("::")[0]] += getattr(report, "processor_seconds", 0.0)

    def problems(self) -> list[str]:
        """Says which folders took more than their budgets."""
        return exceeded(sum_folders(self.files), tomllib.loads(BUDGETS.read_text()), self.loop)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a run that took more than its budgets, and writes the durations."""
        if not self.printing: return
        self.loop = max(self.loop, loop_seconds())
        if session.exitstatus == pytest.ExitCode.OK and self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.getoption("store_durations"):
            kept = {file: round(seconds, 1) for file, seconds in sorted(self.files.items())}
            DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the folders, the longest first."""
        spent = sum_folders(self.files)
        if (total := sum(spent.values())) > PRINTED:
            terminalreporter.section(f"{total:.0f} s of processor time")
            for folder, seconds in spent.most_common():
                terminalreporter.line(f"{seconds:7.1f} s  tests/{folder}")
        for line in self.problems(): terminalreporter.line(line, red=True)


if __name__ == "__main__": BUDGETS.write_text(budgets_of(read_durations(), loop_seconds()))
