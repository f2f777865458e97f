"""Figures of agreement of predictions with hardware (timing/hardware.py): errors by family; within a sweep of
a spec's schedules rank correlation and regret; and means over random halves of the specs.

Protocol: `summary(rows)` has, by family, the figures of the timing model, with the mean error of the judging
half over `SPLITS` deals, and those of the cost model. What a family has no rows or sweeps for is left out.
"""
from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from bench.timing.hardware_rows import FAMILIES, Predicted
from bench.timing.judges import rank_correlation

SPLITS = 8      # deals of specs into a half that may fit constants and one that judges
LEAST = 4       # schedules of a sweep, from which on their order is told
Figures = dict[str, float]


def by_sweep(rows: Sequence[Predicted]) -> list[list[Predicted]]:
    """Returns the rows of each sweep that has at least `LEAST` schedules."""
    groups = defaultdict[tuple[str, str, str], list[Predicted]](list)
    for row in rows: groups[row.row.sweep_of_spec].append(row)
    return [some for some in groups.values() if len(some) >= LEAST]


def times(rows: Sequence[Predicted], which: str) -> list[float]:
    """Microseconds by the timing model ("us") or the cost model ("cost_us")."""
    return [getattr(row, which) for row in rows]


def regret(rows: Sequence[Predicted], which: str) -> float:
    """How much longer than the best the schedule takes that is predicted to be the best."""
    chosen = min(rows, key=lambda row: getattr(row, which))
    return chosen.row.time_us / min(row.row.time_us for row in rows)


def figures(rows: Sequence[Predicted], which: str = "us") -> Figures:
    """Errors in percent over rows, and rank and regret over the sweeps among them, of which none may be: then
    these are left out."""
    rows = [row for row in rows if getattr(row, which) is not None]
    if not rows: return {}
    errors = [100 * (getattr(row, which) / row.row.time_us - 1) for row in rows]
    made = {"rows": len(rows), "mape": mean(map(abs, errors)), "bias": mean(errors),
            "worst": max(errors, key=abs)}
    if sweeps := by_sweep(rows):
        regrets = [regret(some, which) for some in sweeps]
        ranks = [rank_correlation([row.row.time_us for row in some], times(some, which))
                 for some in sweeps if len(set(times(some, which))) > 1]
        made |= {"sweeps": len(sweeps), "regret": mean(regrets), "worst_regret": max(regrets)}
        if ranks: made["rank"] = mean(ranks)
    return made


def by_family(rows: Sequence[Predicted]) -> dict[str, list[Predicted]]:
    """The rows of each family that has some, and all."""
    groups = {name: [row for row in rows if row.row.family == name] for name in FAMILIES.values()}
    return {name: some for name, some in {**groups, "all": list(rows)}.items() if some}


def judge_half(rows: Sequence[Predicted], seed: int) -> list[Predicted]:
    """The rows of every other spec of a random deal, family by family."""
    chosen = set[tuple[str, str]]()
    for name, some in sorted(by_family(rows).items()):
        if name == "all": continue
        specs = sorted({(row.row.part, row.row.spec) for row in some})
        random.Random(f"{seed} {name}").shuffle(specs)
        chosen.update(specs[::2])
    return [row for row in rows if (row.row.part, row.row.spec) in chosen]


def judge_all(rows: Sequence[Predicted]) -> Figures:
    """Returns the mean error of the judging half, by family, over `SPLITS` deals."""
    halves = [by_family(judge_half(rows, seed)) for seed in range(SPLITS)]
    return {name: mean(figures(half[name])["mape"] for half in halves if name in half)
            for name in by_family(rows)}


def summary(rows: Sequence[Predicted]) -> dict[str, dict[str, Figures]]:
    """Returns the figures of both models, by family."""
    halves = judge_all(rows)
    return {name: {"timing": {**figures(some), "judge_mape": halves[name]},
                   "cost": figures(some, "cost_us")}
            for name, some in by_family(rows).items()}
