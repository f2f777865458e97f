"""Predicted times beside those that an H100 measured, of the kernels of tinygrad_nv. No GPU is needed.

    python bench/timing_hardware.py [--quick] [--json] [--dry] [--flash-attention DIR[:INCLUDE…]] [PATTERN …]

Rows are those of hardware_rows.json: each is built again and predicted, by the timing model (ptx/timing/) and
by the cost model of its template (tile/*/cost.py). By family: mean and signed error, the worst row, and what
decides between schedules: within each sweep of a spec's schedules, the rank correlation, and the regret, how
many times as long as the best that was measured the schedule takes that is predicted to be the best.

Constants that are fitted to rows judge nothing on the same rows. So specs are dealt at random into two
halves, eight times: judged is the half that fits nothing, and the table has the mean over the deals.

FlashAttention-3 is predicted from its sources with `--flash-attention`; without, as the record has it.
`--quick` predicts some sweeps of each family, in less than five minutes of one core; `--json` prints the
summary as one line, the last. The record is bench/results/timing_hardware.json; bench/report.py writes its
tables into docs/timing.md.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from bench.lib.measure import RESULTS, each, save, table
from bench.lib.report_timing import COLUMNS, FA3_COLUMNS, fa3_lines, lines
from bench.timing import hardware_fa3
from bench.timing.gate_cases import GPU_NAME
from bench.timing.hardware_judge import LEAST, SPLITS, Figures, by_family, summary
from bench.timing.hardware_rows import (
    FAMILIES,
    HardwareRow,
    Predicted,
    load_rows,
    model_digest,
    predict,
    predict_all,
    to_record,
    workloads,
)
from bench.timing.rows import Checkout
from bench.timing.table import checkout
from tinygrad_nv.ptx.timing.gpu import figures

RECORD = "timing_hardware"
QUICK_S = {"attention forward": 70.0}   # seconds of one core: its one sweep of many schedules
OTHER_QUICK_S = 25.0
FA3_HEAD = "d 128 "         # nvcc builds a kernel of one head size in minutes
Fa3 = list[dict[str, Any]]


# **** FlashAttention-3 ****

def fa3_measured() -> Figures:
    """Times of FlashAttention-3 over ours, which an H100 took in turns, by workload."""
    record = json.loads((RESULTS / "gpu_h100-80gb-hbm3.json").read_text())["parts"]["attention"]
    return {name: median(row["seconds"]["FlashAttention-3"]) / median(row["seconds"]["ours"])
            for name, row in record.items()
            if name.startswith(FA3_HEAD) and "FlashAttention-3" in row.get("seconds", {})}


def fa3_rows(rows: Sequence[HardwareRow], there: Checkout) -> Fa3:
    """Measured and modelled ratios. Raises the project's errors where something cannot be predicted."""
    defaults = {row.spec: row for row in rows if row.part == "attention" and row.sweep.startswith("gpu ")}
    found = []
    for name, ratio in fa3_measured().items():
        theirs = hardware_fa3.predict(workloads("attention")[name], there)
        us = 1e6 * (theirs.cycles / theirs.clock_hz + figures(GPU_NAME).gap_s)
        ours_us = predict(defaults[name]).us
        found.append({"shape": name, "measured": round(ratio, 4), "modelled": round(us / ours_us, 4),
                      "fa3_us": round(us, 2), "ours_us": round(ours_us, 2), "model": model_digest()})
    return found


# **** what is kept ****

def short(families: Mapping[str, Mapping[str, Figures]], fa3: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The line of `--json`."""
    names = ("rows", "mape", "rank", "regret")
    return {"families": {family: {name: both["timing"].get(name) for name in names}
                         for family, both in families.items()},
            "fa3": [{name: row[name] for name in ("shape", "measured", "modelled")} for row in fa3]}


def plot(rows: Sequence[Predicted]) -> None:
    """Draws predicted over measured."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, some in by_family(rows).items():
        if name == "all": continue
        measured = [row.row.time_us for row in some]
        axes.semilogx(measured, [1 + row.error for row in some], ".", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="measured, µs", ylabel="predicted over measured", ylim=(0, 2))
    axes.legend()
    figure.savefig(RESULTS / f"{RECORD}.png", dpi=100, bbox_inches="tight")


def load_record() -> dict[str, Any]:
    """The record there is."""
    file = RESULTS / f"{RECORD}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


# **** the command ****

def quick(rows: Sequence[HardwareRow]) -> list[HardwareRow]:
    """Whole sweeps of each family for some seconds: those that tell an order first, of these the cheapest."""
    chosen = []
    for family in FAMILIES.values():
        sweeps = defaultdict[tuple[str, str, str], list[HardwareRow]](list)
        for row in rows:
            if row.family == family: sweeps[row.sweep_of_spec].append(row)
        left = QUICK_S.get(family, OTHER_QUICK_S)
        def late(some: Sequence[HardwareRow]) -> tuple[bool, float]:
            return len(some) < LEAST, mean(row.cost_s for row in some)
        for some in sorted(sweeps.values(), key=late):
            if (cost := sum(row.cost_s for row in some)) > left: continue
            left -= cost
            chosen += some
    return chosen


def main() -> int:
    """Predicts and compares."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="parts of rows' names (default: all)")
    parser.add_argument("--quick", action="store_true", help="some sweeps of each family")
    parser.add_argument("--json", action="store_true", help="print the summary as one line, the last")
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("--flash-attention", type=checkout, metavar="DIR[:INCLUDE…]",
                        help="github.com/Dao-AILab/flash-attention, then CUTLASS's and CCCL's headers")
    given = parser.parse_args()
    every = load_rows()
    rows = [row for row in every if not given.patterns or any(one in str(row) for one in given.patterns)]
    found, refused = predict_all(list(each(quick(rows) if given.quick else rows)))
    for name, why in refused.items(): print(f"{name}: {why}", file=sys.stderr)
    fa3 = fa3_rows(every, given.flash_attention) if given.flash_attention else load_record().get("fa3", [])
    families = summary(found)
    print(table(COLUMNS, list(lines(families))))
    print(table(FA3_COLUMNS, list(fa3_lines(fa3))))
    if not (given.dry or given.quick or given.patterns):
        save(RECORD, {"gpu": "h100", "model": model_digest(), "splits": SPLITS, "families": families,
                      "fa3": fa3, "refused": refused, "rows": [to_record(row) for row in found]})
        plot(found)
    if given.json: print(json.dumps(short(families, fa3), ensure_ascii=False))
    return 0
