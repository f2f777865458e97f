"""Plans beside published rows (plan_rows.py): `tinygrad-nv plan` is a model, and this is how far off it is.
No GPU is needed.

    python bench/timing/plan_check.py [--fit] [--page FILE.md] [--plot] [PATTERN ...]

The record is results/plan_check.json, with every row, its source, what was published and what is modelled.
Errors are of rows that no constant was fitted to: median and worst of each group. `--fit` prints the shares
of figures.toml that the other rows give; `--page` writes the summary between the two lines MARK of a page;
`--plot` draws results/plan_check.png.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, put_between, save, table
from bench.timing.plan_rows import SHARES, Row, Shares, latencies, rows, throughputs, training

RECORD, MARK = "plan_check", "<!-- plan_check -->"
ROOT = RESULTS.parents[1]
GROUPS = ("training", "memory", "few sequences", "first token", "many sequences", "collectives")
STEPS = tuple(i / 100 for i in range(30, 101))


def errors(found: Sequence[Row], group: str) -> list[float]:
    """Returns the errors of the rows that judge, without signs."""
    return [abs(row.error) for row in found if row.group == group and not row.fitted]


def summary(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line a group: rows, rows that judge, median error with its sign, median and worst without."""
    lines: list[tuple[str, ...]] = []
    for group in GROUPS:
        every = [row for row in found if row.group == group]
        if not (judged := [row for row in every if not row.fitted]): continue
        worst = max(judged, key=lambda row: abs(row.error))
        lines.append((group, f"{len(every)}", f"{len(judged)}", f"{median(row.error for row in judged):+.0%}",
                      f"{median(errors(found, group)):.0%}",
                      f"{worst.error:+.0%}: {worst.source}, {worst.name}"))
    return lines


HEADER = ("rows", "published", "that judge", "median error", "without sign", "worst")


def markdown(found: Sequence[Row]) -> str:
    """The summary for a page."""
    lines = [HEADER, ("---",) * len(HEADER), *summary(found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(found: Sequence[Row], path: Path) -> None:
    """Each row's error, by group: rows that judge filled, those that were fitted hollow."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    for place, group in enumerate(GROUPS):
        rows = [row for row in found if row.group == group]
        for row in rows:
            height = place + 0.6 * (crc32(row.name.encode()) % 100 / 100 - 0.5)
            axes.plot(row.modelled / row.published, height, "o", markersize=4, color=f"C{place}",
                      markerfacecolor="none" if row.fitted else f"C{place}")
    axes.set_xscale("log")
    axes.set_xticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
    axes.minorticks_off()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(GROUPS)), GROUPS)
    axes.invert_yaxis()
    axes.set_xlabel("modelled / published (filled: judges, hollow: fitted to)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"written to {path.relative_to(ROOT)}")


# **** the shares ****

def best(made: Callable[[float], Iterator[Row]]) -> float:
    """The share at which the median of |log modelled / published| of the fitted rows is least."""
    def off(share: float) -> float:
        return median(abs(log(row.modelled / row.published)) for row in made(share)
                      if row.fitted and row.group != "memory")
    return min(STEPS, key=off)


def fit_shares() -> Shares:
    """Fits the shares: of training without what `overlap` changes first, then that, then of inference."""
    def training_rows(share: float) -> Iterator[Row]:
        return (row for row in training(replace(SHARES, training=share)) if "overlapped" not in row.name)
    first = best(training_rows)
    def overlap_rows(share: float) -> Iterator[Row]:
        return (row for row in training(Shares(first, SHARES.inference, share)) if "overlapped" in row.name)
    def inference_rows(share: float) -> Iterator[Row]:
        yield from latencies(replace(SHARES, inference=share))
        yield from throughputs(replace(SHARES, inference=share))
    return Shares(first, best(inference_rows), best(overlap_rows))


def record(found: Sequence[Row]) -> dict[str, Any]:
    """All rows."""
    return {"what": "modelled beside published rows; nothing was measured here", "shares": asdict(SHARES),
            "rows": [{**asdict(row), "error": row.error} for row in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="parts of names or sources")
    parser.add_argument("--fit", action="store_true", help="print the shares that half of the rows gives")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the summary there, too")
    parser.add_argument("--plot", action="store_true", help=f"draw results/{RECORD}.png (needs matplotlib)")
    given = parser.parse_args()
    if given.fit:
        print(fit_shares())
        return
    found = [row for row in rows() if not given.patterns
             or any(word in f"{row.group} {row.source} {row.name}" for word in given.patterns)]
    lines = [(f"{row.group}: {row.name}", row.source, f"{row.published:.5g}", f"{row.modelled:.4g}", row.unit,
              f"{row.error:+.0%}", "fitted" if row.fitted else "") for row in found]
    print(table(("row", "source", "published", "modelled", "", "error", ""), lines))
    print("\n" + table(HEADER, summary(found)))
    if given.patterns: return      # not all rows
    if given.page: put_between(given.page, MARK, markdown(found))
    if given.plot: plot(found, RESULTS / f"{RECORD}.png")
    save(RECORD, record(found))


if __name__ == "__main__": main()
