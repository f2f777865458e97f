"""Predicted times beside measured ones (bench/timing/hardware.py): figures, halves, rows, the page."""
from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean

import pytest

from bench.lib import report_timing
from bench.lib.measure import RESULTS
from bench.timing import hardware
from bench.timing.hardware_judge import (
    LEAST,
    SPLITS,
    by_family,
    figures,
    judge_all,
    judge_half,
    regret,
    summary,
)
from bench.timing.hardware_rows import FAMILIES, HardwareRow, Predicted, load_rows, predict, workloads

ROWS = load_rows()


def make_prediction(us: float, measured: float, spec: str = "a", part: str = "gemm",
                    cost: float | None = None, beside: float = 0.0) -> Predicted:
    row = HardwareRow(part, spec, "schedules", {}, measured + beside, "", beside)
    return Predicted(row, us, cost, True, 1755.0, "HBM")


def test_errors_are_of_ours_alone():
    found = figures([make_prediction(11, 10, beside=5), make_prediction(6, 8, "b", beside=5)])
    assert found == {"rows": 2, "mape": pytest.approx(17.5), "bias": pytest.approx(-7.5),
                     "worst": pytest.approx(-25)}


def test_rank_and_regret_are_of_one_sweep():
    one = [make_prediction(us, measured) for us, measured in ((1, 12), (2, 10), (3, 20), (4, 30))]
    other = [make_prediction(us, measured, "b") for us, measured in ((4, 1), (3, 2), (2, 3), (1, 4))]
    found = figures([*one, *other, make_prediction(1, 1, "alone")])
    assert regret(one, "us") == pytest.approx(1.2)
    assert (found["sweeps"], found["worst_regret"]) == (2, pytest.approx(4))
    assert found["regret"] == pytest.approx(2.6)
    assert found["rank"] == pytest.approx((0.8 - 1) / 2)


def test_fewer_schedules_tell_no_order():
    assert "rank" not in figures([make_prediction(us, us) for us in range(1, LEAST)])


def test_equal_predictions_have_regret_and_no_rank():
    found = figures([make_prediction(1, us) for us in range(1, LEAST + 1)])
    assert (found["regret"], "rank" in found) == (1, False)


def test_rows_without_a_cost_are_left_out():
    rows = [make_prediction(1, 10, cost=11), make_prediction(1, 10)]
    assert figures(rows, "cost_us") == {"rows": 1, "mape": pytest.approx(10), "bias": pytest.approx(10),
                                        "worst": pytest.approx(10)}
    assert figures([rows[1]], "cost_us") == {}


def test_a_half_has_whole_specs_of_each_family():
    rows = [make_prediction(1, 1, str(spec), part) for spec in range(6) for part in ("gemm", "paged")
            for _ in range(3)]
    for seed in range(SPLITS):
        half = judge_half(rows, seed)
        assert len(half) == len(rows) // 2
        assert all(rows.count(row) == half.count(row) for row in half)
    assert len({tuple(row.row.spec for row in judge_half(rows, seed)) for seed in range(SPLITS)}) > 2


def test_judged_is_the_mean_of_the_halves():
    rows = [make_prediction(10 + spec, 10, str(spec)) for spec in range(4)]
    halves = [mean(10 * int(row.row.spec) for row in judge_half(rows, seed)) for seed in range(SPLITS)]
    assert judge_all(rows)["gemm"] == pytest.approx(mean(halves))
    assert summary(rows)["gemm"]["timing"]["judge_mape"] == pytest.approx(mean(halves))


def test_rows_are_of_workloads_and_of_all_families():
    assert {row.family for row in ROWS} == set(FAMILIES.values())
    assert len(set(map(str, ROWS))) > 300
    assert all(row.spec in workloads(row.part) and row.time_us > 0 and len(row.ptx) == 16
               for row in ROWS)


def test_quick_has_whole_sweeps_of_every_family():
    chosen = hardware.quick(ROWS)
    assert {row.family for row in chosen} == set(FAMILIES.values())
    assert sum(row.cost_s for row in chosen) < 250
    sweeps = {row.sweep_of_spec for row in chosen}
    assert len(chosen) == sum(row.sweep_of_spec in sweeps for row in ROWS)


def test_a_kernel_is_what_ran_and_is_predicted_once(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    row = next(row for row in ROWS if row.spec == "rms 64x4096")
    found = predict(row)
    assert found.as_ran
    assert 0.3 < found.us / row.time_us < 2
    assert predict(replace(row, ptx="0" * 16)) == replace(found, row=replace(row, ptx="0" * 16), as_ran=False)


def test_the_line_of_json_has_what_is_asked():
    rows = [make_prediction(us, measured, cost=1) for us, measured in ((1, 12), (2, 10), (3, 20), (4, 30))]
    fa3 = [{"shape": "d 128", "measured": 0.9, "modelled": 1.1, "model": "x"}]
    found = hardware.short(summary(rows), fa3)
    assert set(found["families"]["gemm"]) == {"rows", "mape", "rank", "regret"}
    assert found["fa3"] == [{"shape": "d 128", "measured": 0.9, "modelled": 1.1}]


def test_the_page_says_where_a_sign_is_wrong():
    (cells,) = report_timing.fa3_lines([{"shape": "d 128", "measured": 0.9, "modelled": 1.08}])
    assert cells == ("d 128", "0.90", "1.08", "+20", "no")


def test_the_record_is_of_all_rows():
    record = json.loads((RESULTS / f"{hardware.RECORD}.json").read_text())
    assert len(record["rows"]) + len(record["refused"]) == len(ROWS)
    assert record["families"]["all"]["timing"]["rows"] == len(record["rows"])
    ratios = {row["shape"]: row["measured"] for row in record["fa3"]}
    assert ratios == pytest.approx(hardware.fa3_measured(), abs=1e-4)


def test_families_come_in_one_order():
    rows = [make_prediction(1, 1, part=part) for part in reversed(FAMILIES)]
    assert list(by_family(rows)) == [*FAMILIES.values(), "all"]
