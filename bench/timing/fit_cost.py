"""Fits the cost model's figures of the H100 to what one measured, and judges them by specs that did not fit.

    python bench/timing/fit_cost.py

hardware_judge.py's deals make halves of the specs of hardware_rows.json. In each deal `FIGURES` of
tile/gpu.py are moved by turns while the mean error of the fitting half falls; the table says, by deal, the
mean error of either half with the figures of tile/gpu.py and with those that were fitted, and the rank and
regret of the judging half. The last row is fitted to all specs.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import tinygrad_nv.tile.gpu as tile_gpu
from bench.lib.measure import table
from bench.timing.hardware_judge import SPLITS, figures, judge_half
from bench.timing.hardware_rows import Predicted, cost_us, load_kernels, load_rows, spec_of
from tinygrad_nv.tile.gpu import GPUModel
from tinygrad_nv.tile.templates import TABLE

# not the launch's, which are a node's of a graph also where there is no matmul
FIGURES = ("hbm_bytes_per_s", "l2_bytes_per_s", "sustained", "l2_power", "mma_share", "load_s")
STEPS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25)   # times a figure
ROUNDS = 6          # of all figures, at most
LEAST = 0.005       # percent of the error by which a step has to lower it


class Rows:
    """Rows of templates that have a cost model, with their times by figures of the GPU."""

    def __init__(self) -> None:
        self.given = [(row, spec_of(row), TABLE.read("gpu", row.schedule)) for row in load_rows()
                      if row.spec not in load_kernels()]
        self.given = [each for each in self.given if TABLE.of(each[2]).cost is not None]

    def predict(self, gpu: GPUModel) -> list[Predicted]:
        """Predicts all rows with a GPU's figures."""
        models = tile_gpu.GPU_MODELS
        tile_gpu.GPU_MODELS = (gpu, *models[1:])
        tile_gpu.gpu_model_for.cache_clear()
        try: return [Predicted(row, 0.0, cost_us(spec, s), True, 0.0, "") for row, spec, s in self.given]
        finally:
            tile_gpu.GPU_MODELS = models
            tile_gpu.gpu_model_for.cache_clear()


def error(rows: Sequence[Predicted]) -> float:
    """Mean error in percent, of families in equal parts."""
    return mean(figures([row for row in rows if row.row.family == family], "cost_us")["mape"]
                for family in {row.row.family for row in rows})


def fit(rows: Rows, judges: set[int], gpu: GPUModel) -> GPUModel:
    """Moves figures while the error of the rows that do not judge falls."""

    def of(changed: GPUModel) -> float:
        return error([row for n, row in enumerate(rows.predict(changed)) if n not in judges])
    least = of(gpu)
    for _ in range(ROUNDS):
        before = least
        for name in FIGURES:
            tried = [replace(gpu, **{name: getattr(gpu, name) * step}) for step in STEPS]
            errors = [of(each) for each in tried]
            if min(errors) < least - LEAST: least, gpu = min(errors), tried[errors.index(min(errors))]
        if before - least < LEAST: break
    return gpu


def cells(name: str, found: Sequence[Predicted], judges: set[int]) -> tuple[str, ...]:
    """A row of the table."""
    judging = [row for n, row in enumerate(found) if n in judges]
    fitting = [row for n, row in enumerate(found) if n not in judges]
    made: dict[str, Any] = figures(judging, "cost_us")
    return (name, f"{error(fitting):.1f}" if fitting else "", f"{error(judging):.1f}", f"{made['rank']:.2f}",
            f"{made['regret']:.3f}")


def main() -> int:
    """Prints the table, and the figures."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rows, gpu = Rows(), tile_gpu.H100
    today, lines = rows.predict(gpu), []
    for seed in range(SPLITS):
        judging = {id(row) for row in judge_half(today, seed)}
        judges = {n for n, row in enumerate(today) if id(row) in judging}
        fitted = fit(rows, judges, gpu)
        lines += [cells(f"deal {seed}, today", today, judges),
                  cells(f"deal {seed}, fitted", rows.predict(fitted), judges)]
        print(seed, *lines[-2:], {name: getattr(fitted, name) for name in FIGURES}, file=sys.stderr)
    everything = set(range(len(today)))
    fitted = fit(rows, set(), gpu)
    lines += [cells("all, today", today, everything), cells("all, fitted", rows.predict(fitted), everything)]
    print(table(("", "fitting half, %", "judging half, %", "rank", "regret"), lines))
    for name in FIGURES: print(f"{name:18s} {getattr(gpu, name):12.4g} {getattr(fitted, name):12.4g}")
    return 0


if __name__ == "__main__": sys.exit(main())
