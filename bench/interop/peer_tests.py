"""Runs the tests of another project on two sides, and lists what passes on the one and not on the other.

Protocol: `Run` has the two sides, `judged` first, and how a test file is started on a side; `run_files` runs
what the logs have not, `compare` makes the table and the record. Each file runs in a process of its own, with
the plugin outcome_plugin. A test that takes longer than the limit, or ends the process, is noted, and the
rest of its file runs in a new process. Everything is noted as it happens, so that a call can be resumed.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import table

POLL_S = 0.2
# one process runs the tests of a file: its interpreter, options, variables and folder
Start = Callable[[str, str], tuple[list[str], dict[str, str], Path]]
PYTEST = ("-P", "-m", "pytest", "-q", "-p", "outcome_plugin", "-p", "no:cacheprovider", "-c", os.devnull)


@dataclass(frozen=True)
class Run:
    """Settings of a whole call. `start(file, side)` gives command, environment and folder of a process.
    `start_s` is the time for imports and collection, and for servers, beyond the time of a test. The judged
    side runs first, or the judge with `judge_first`. `quick`: the second side runs only tests that can be
    differences then."""
    judged: str
    judge: str
    logs: Path
    timeout_s: float
    start: Start
    known: Sequence[dict[str, Any]]
    device: str = "CPU"
    start_s: float = 120
    quick: bool = False
    judge_first: bool = False

    @property
    def sides(self) -> tuple[str, str]: return self.judged, self.judge

    @property
    def order(self) -> tuple[str, str]:
        """The sides as they run."""
        return (self.judge, self.judged) if self.judge_first else self.sides

    def log(self, file: str, side: str) -> Path:
        """Returns the path at which the outcomes of a file's tests are noted."""
        return self.logs / side / (file.replace("/", ".") + "l")


@dataclass(frozen=True)
class Difference:
    """A test that passes on the side of the judge only. `known`: the reason in the list, or ""."""
    test: str
    outcome: str
    why: str
    known: str


# **** running ****

def lines(log: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def note(log: Path, **line: Any) -> None:
    """Appends a line to a log."""
    with log.open("a") as file: file.write(json.dumps(line) + "\n")


def find_unfinished(log: Path) -> str | None:
    """The test that has begun and has no outcome."""
    known = lines(log)
    return known[-1]["begin"] if known and "begin" in known[-1] and "passed" not in known[-1] else None


def run_process(run: Run, file: str, side: str, log: Path) -> tuple[str, str]:
    """Runs a file's tests that the log has not, until they end or one takes too long. How it ended: "" when
    all was well, "timeout", or in words; and the end of what was printed."""
    command, env, folder = run.start(file, side)
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, cwd=folder, env=env | {"OUTCOMES": str(log)}, stdout=out,
                                 stderr=subprocess.STDOUT)
        size, since = -1, time.monotonic()
        try:
            while child.poll() is None:
                if (now := log.stat().st_size if log.exists() else 0) != size:
                    size, since = now, time.monotonic()
                limit_s = run.timeout_s if find_unfinished(log) else run.timeout_s + run.start_s
                if time.monotonic() - since > limit_s: return "timeout", ""
                time.sleep(POLL_S)
        finally: end_all(child)
        out.seek(0)
        said = out.read()[-2000:]
    # 0: passed, 1: some failed, 2: some could not be imported, 5: none left
    return ("", said) if child.returncode in (0, 1, 2, 5) else (f"exit code {child.returncode}", said)


def end_all(child: subprocess.Popen[bytes]) -> None:
    """Kills a process that still runs, and what it has started: servers have sessions of their own, and tests
    that are interrupted go on with those that follow."""
    if child.poll() is None:
        for pid in [*find_descendants(child.pid), child.pid]:
            with contextlib.suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)
    child.wait()


def find_descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have, where there is /proc."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # "7 (a name) S 1 …": the parent is behind the state
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found: found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def run_file(file: str, run: Run, side: str) -> None:
    """Runs a file to its end, in as many processes as it takes."""
    log = run.log(file, side)
    log.parent.mkdir(parents=True, exist_ok=True)
    if run.quick and side == run.order[1] and not log.exists():
        before = outcomes(run, file, run.order[0])
        decided = [name for name, line in before.items()
                   if (line["outcome"] == "passed") != run.judge_first]
        for name in decided: note(log, begin=name, passed=True)
        if len(decided) == len(before): note(log, end=True)
    if find_unfinished(log) is not None:       # a call before was ended here
        log.write_text("".join(json.dumps(line) + "\n" for line in lines(log)[:-1]))
    while not any("end" in line for line in lines(log)):
        how, said = run_process(run, file, side, log)
        test = find_unfinished(log)
        if how == "timeout": why = f"no end within {run.timeout_s:g} s"
        else: why = f"{how}: {' '.join(said.split())[-300:]}"
        outcome = "timeout" if how == "timeout" else "crashed"
        if test is not None or how: note(log, id=test or file, outcome=outcome, why=why)
        if test is None: note(log, end=True)
    counts = Counter(line["outcome"] for line in lines(log) if "id" in line)
    print(f"{side:6} {file}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}",
          file=sys.stderr, flush=True)


def run_files(run: Run, files: Sequence[str], jobs: int = 1) -> None:
    """Runs all files on both sides, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        for side in run.order: list(pool.map(partial(run_file, run=run, side=side), files))


# **** comparing ****

def outcomes(run: Run, file: str, side: str) -> dict[str, dict[str, Any]]:
    """Outcomes of a file's tests by id."""
    return {line["id"]: line for line in lines(run.log(file, side)) if "id" in line}


def reason_for(run: Run, test: str, why: str) -> str:
    """The reason why this test may differ, "" when there is none: the device, the test and the words of its
    failure must be those of an entry."""
    for each in run.known:
        if run.device in each.get("devices", (run.device,)) and test in each["tests"] and each["says"] in why:
            return str(each["reason"])
    return ""


def find_differences(run: Run, file: str) -> list[Difference]:
    """Tests of a file that pass on the side of the judge only."""
    made, judged = [], outcomes(run, file, run.judged)
    for test, before in outcomes(run, file, run.judge).items():
        after = judged.get(test, {"outcome": "not run"})
        if before["outcome"] != "passed" or after["outcome"] == "passed": continue
        why = after.get("why", "")
        made.append(Difference(test, after["outcome"], why, reason_for(run, test, why)))
    return made


def count_passed(found: Mapping[str, dict[str, Any]]) -> int:
    """How many tests passed."""
    return sum(each["outcome"] == "passed" for each in found.values())


def cells(run: Run, counts: Mapping[str, int]) -> list[str]:
    """A row of the table."""
    both = [f"{counts[side]} of {counts[f'{side}_run']}" for side in run.sides]
    return [*both, str(counts["known"]), str(counts["differ"])]


def compare(run: Run, files: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The table with what differs below it, and the record."""
    rows, record, shown = [], {}, []
    totals: Counter[str] = Counter()
    for file in files:
        differ = find_differences(run, file)
        counts = {"known": sum(bool(each.known) for each in differ),
                  "differ": sum(not each.known for each in differ)}
        for side in run.sides:
            found = outcomes(run, file, side)
            counts |= {side: count_passed(found), f"{side}_run": len(found)}
        totals.update(counts)
        rows.append([file, *cells(run, counts)])
        record[file] = {**counts, "differences": [vars(each) for each in differ]}
        shown += [f"{each.test}: {each.outcome}: {each.known or each.why}"
                  for each in sorted(differ, key=lambda each: bool(each.known))]
    rows.append(["all", *cells(run, totals)])
    head = ["", *(f"passed {side}" for side in run.sides), "differ as known", "differ"]
    title = f"pass {run.judge}, do not pass {run.judged}:"
    text = "\n".join([table(head, rows), *(["", title, *shown] if shown else [])])
    return text, {**totals, "files": record}


def exit_with(run: Run, record: Mapping[str, Any]) -> None:
    """Ends the script: with 1 where something differs that is not listed, or where nothing was compared."""
    if not any(record[side] for side in run.sides):
        raise SystemExit("no test passes on either side, so nothing was compared; expected: what the tests "
                         "import is installed; --logs has their errors")
    raise SystemExit(1 if record["differ"] else 0)
