"""Agreement of predicted and published times: bench/timing/judges.py."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.timing import check as timing_check
from bench.timing import deepgemm as timing_deepgemm
from bench.timing import fa3 as timing_fa3
from bench.timing.judges import Judged, agreement, rank_correlation, to_ptx
from tinygrad_nv.errors import NVError


def row(published: float, predicted: float, family: str = "fast.cu", fitted: bool = False) -> Judged:
    return Judged(family, f"{published}", published, predicted, fitted)


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 200, 201]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [5, 5, 6]) == pytest.approx(1)


def test_rows_that_were_fitted_judge_nothing():
    found = agreement([row(100, 110), row(200, 190), row(300, 900, fitted=True)])
    assert found == {"rows": 2, "mape": pytest.approx(0.075), "worst": pytest.approx(0.1),
                     "rank": pytest.approx(1)}


def test_the_summary_has_families_and_all_together():
    rows = [row(100, 110), row(200, 200), row(300, 330, "DeepGEMM"), row(400, 400, "DeepGEMM")]
    found = timing_check.summary(rows)
    assert list(found) == ["fast.cu", "DeepGEMM", "together"]
    assert found["together"]["rows"] == 4
    assert [cells[-1] for cells in timing_check.rows_of(rows)] == ["+10.0%", "+0.0%", "+10.0%", "+0.0%"]


def test_published_tables_are_whole_and_few_rows_are_fitted():
    assert all(len(each) == len(timing_fa3.TOKENS) for each in timing_fa3.PUBLISHED.values())
    assert set(timing_deepgemm.PUBLISHED) > timing_deepgemm.FITTED
    assert all((head, causal) in timing_fa3.PUBLISHED for head, causal, _ in timing_fa3.FITTED)


def test_the_page_says_what_the_record_has():
    record = json.loads((timing_check.RESULTS / f"{timing_check.RECORD}.json").read_text())
    page = (Path(timing_check.__file__).parents[2] / "docs" / "timing.md").read_text()
    assert record["agreement"] == timing_check.summary([Judged(**each) for each in record["rows"]])
    for name, found in record["agreement"].items():
        cells = f"{found['mape']:.1%}", f"{found['worst']:.1%}"
        mean, worst = (cell.replace("%", " %") for cell in cells)
        assert f"| {name} | {found['rows']} | {mean} | {worst} | {found['rank']:.3f} |" in page


def test_what_nvcc_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\necho 'k.cu(1): error: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("bench.timing.judges.CACHE", tmp_path)
    with pytest.raises(NVError, match=r"k.cu\(1\): error: no such thing"): to_ptx("void", [])
