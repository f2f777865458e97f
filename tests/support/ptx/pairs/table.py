"""The pairs and what was found, as a table."""
from __future__ import annotations

from dataclasses import dataclass

from .template import Kernel, points, run

SEEDS: tuple[int | str, ...] = (0, 1, 2, 3, "late")


@dataclass(frozen=True)
class Row:
    """One pair: under how many seeds the bug was found as expected, the kinds found, findings of the cure."""
    kernel: str
    bug: str
    expected: tuple[str, ...]
    found: tuple[str, ...]
    seeds: int
    alarms: int


def row(case: Kernel, bug: str) -> Row:
    """Runs a pair under all seeds."""
    outcomes = [run(case, bug, seed) for seed in SEEDS]
    kinds = sorted({finding.kind for outcome in outcomes for finding in outcome.findings})
    seeds = sum(any(points(case, bug, finding) for finding in outcome.findings) for outcome in outcomes)
    alarms = sum(len(run(case, None, seed).findings) for seed in SEEDS)
    return Row(case.name, bug, case.bugs[bug], tuple(kinds), seeds, alarms)


def rows(cases: list[Kernel]) -> list[Row]:
    """A row for each pair."""
    return [row(case, bug) for case in cases for bug in case.bugs]


def table(rows: list[Row]) -> str:
    """The rows, and sums below."""
    lines = [f"{'kernel':10} {'bug':22} {'seeds':5} {'alarms':6} {'expected, any of':38} found"]
    lines += [f"{r.kernel:10} {r.bug:22} {r.seeds}/{len(SEEDS)}   {r.alarms:<6} {', '.join(r.expected):38} "
              f"{', '.join(r.found) or '-'}" for r in rows]
    recall = sum(r.seeds for r in rows) / (len(rows) * len(SEEDS))
    alarms = sum({r.kernel: r.alarms for r in rows}.values())
    return "\n".join([*lines, f"{len(rows)} pairs, {len({r.kernel for r in rows})} kernels, seeds {SEEDS}: "
                              f"recall {recall:.1%}, false alarms {alarms}"])
