"""Fitting the cost model's figures (bench/timing/fit_cost.py): what is recovered, and from which rows."""
from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from bench.timing import fit_cost
from bench.timing.hardware_rows import Predicted
from tinygrad_nv.tile import gpu as tile_gpu
from tinygrad_nv.tile.gpu import H100

ROWS = fit_cost.Rows()


def time_as(rows: list[Predicted]) -> list[Predicted]:
    """Rows that a GPU took just as long for as is predicted."""
    return [replace(row, row=replace(row.row, us=row.cost_us or 0.0, beside_us=0.0)) for row in rows]


def pretend(seen: list[Predicted]) -> fit_cost.Rows:
    """Rows that measured what others were predicted to take."""
    made = fit_cost.Rows()
    made.given = [(row.row, spec, s) for row, (_, spec, s) in zip(seen, ROWS.given, strict=True)]
    return made


def test_a_figure_is_found_again():
    slow = replace(H100, hbm_bytes_per_s=0.8 * H100.hbm_bytes_per_s)
    rows = pretend(time_as(ROWS.predict(slow)))
    with mock.patch.object(fit_cost, "FIGURES", ("hbm_bytes_per_s",)): found = fit_cost.fit(rows, set(), H100)
    assert found.hbm_bytes_per_s == pytest.approx(slow.hbm_bytes_per_s)
    assert fit_cost.error(rows.predict(found)) == pytest.approx(0, abs=1e-6)


def test_rows_that_judge_fit_nothing():
    seen = time_as(ROWS.predict(H100))
    judges = {n for n in range(len(seen)) if n % 3}
    for n in judges: seen[n] = replace(seen[n], row=replace(seen[n].row, us=2 * seen[n].row.us))
    assert fit_cost.fit(pretend(seen), judges, H100) == H100
    assert fit_cost.fit(pretend(seen), set(), H100) != H100


def test_figures_of_the_package_stay():
    before = tile_gpu.gpu_model_for("sm_90a", 132)
    ROWS.predict(replace(H100, clock_hz=1e9))
    assert tile_gpu.gpu_model_for("sm_90a", 132) == before == H100
