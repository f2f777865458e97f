"""The pytest plugin of peer_tests.py: writes what becomes of each test, as it becomes known.

A line of JSON for a test that begins ({"begin": id}) and one for its outcome ({"id", "outcome", "seconds",
"why", "trace"}), so that a process that dies has told everything up to the test that ended it. Tests that the
file OUTCOMES has begun are not run again.
"""
from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

LOG = Path(os.environ["OUTCOMES"])
OUTCOMES = ("failed", "skipped", "xfailed", "passed")    # of a test's phases, the first of these counts
_reports: list[pytest.TestReport] = []
_began = 0.0


def write(**line: Any) -> None:
    """Appends a line, at once."""
    with LOG.open("a") as log: log.write(json.dumps(line) + "\n")


def outcome(report: pytest.TestReport) -> str:
    """passed, failed, skipped or xfailed."""
    return "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome


def reason(report: Any) -> str:
    """The message of a failure, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else report.longreprtext).split())[:400]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what was run before."""
    lines = map(json.loads, LOG.read_text().splitlines()) if LOG.exists() else ()
    begun = {line.get("begin") for line in lines}
    items[:] = [item for item in items if item.nodeid not in begun]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if not report.failed: return
    write(begin=report.nodeid)
    write(id=report.nodeid, outcome="failed", seconds=0.0, why=reason(report), trace=report.longreprtext)


def pytest_runtest_logstart(nodeid: str) -> None:
    global _began
    _reports.clear()
    _began = time.perf_counter()
    write(begin=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    worst = min(_reports, key=lambda report: OUTCOMES.index(outcome(report)))
    failed = worst.outcome == "failed"
    write(id=nodeid, outcome=outcome(worst), seconds=round(time.perf_counter() - _began, 3),
          why=reason(worst) if failed else "", trace=worst.longreprtext[-6000:] if failed else "")
