"""bench/timing/plan_check.py: plans beside published rows, and how far off they may be."""
from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from bench.lib.measure import put_between
from bench.timing import plan_check
from bench.timing.plan_rows import SHARES, Row, collectives, latencies, rows, training

RECORD = json.loads((plan_check.RESULTS / f"{plan_check.RECORD}.json").read_text())
RECORDED = [Row(**{key: value for key, value in row.items() if key != "error"}) for row in RECORD["rows"]]
# median and worst of rows that no constant was fitted to, in percent
STATED = {"training": (6, 24), "memory": (13, 27), "few sequences": (26, 127), "first token": (18, 51),
          "many sequences": (13, 28), "collectives": (17, 56)}


def same(found: Row) -> None:
    (known,) = [row for row in RECORDED if (row.group, row.name) == (found.group, found.name)]
    assert found.modelled == pytest.approx(known.modelled, rel=1e-6), "run bench/timing/plan_check.py again"
    assert (found.published, found.source, found.fitted) == (known.published, known.source, known.fitted)


@pytest.mark.parametrize("group", STATED)
def test_errors_are_what_is_stated(group: str):
    found = [100 * each for each in plan_check.errors(RECORDED, group)]
    assert median(found) <= STATED[group][0]
    assert max(found) <= STATED[group][1]


def test_the_record_has_every_row_with_its_source():
    assert {row.group for row in RECORDED} == set(STATED)
    assert len(RECORDED) == len({(row.group, row.name) for row in RECORDED}) > 130
    assert all(row.source and row.published > 0 for row in RECORDED)


def test_shares_are_fitted_to_half_of_the_rows_and_kernels_to_their_own():
    speeds = [row for row in RECORDED if row.group not in ("memory", "collectives")]
    assert 0.35 < sum(row.fitted for row in speeds) / len(speeds) < 0.65
    kernels = [row for row in RECORDED if row.name.endswith(("one-shot", "two-shot"))]
    assert [row for row in RECORDED if row.group == "collectives" and row.fitted] == kernels
    assert not any(row.fitted for row in RECORDED if row.group == "memory")


def test_collectives_are_what_the_record_says():
    found = list(collectives())
    for row in found: same(row)
    assert len(found) == sum(row.group == "collectives" for row in RECORDED)


def test_the_first_rows_are_what_the_record_says():
    for group in (training, latencies): same(next(group(SHARES)))


@pytest.mark.slow
def test_every_row_is_what_the_record_says():
    found = list(rows())
    for row in found: same(row)
    assert len(found) == len(RECORDED)


@pytest.mark.slow
def test_the_shares_are_those_that_their_rows_give():
    assert plan_check.fit_shares() == SHARES


def test_a_share_is_found_where_it_was_put():
    def made(share: float):
        for times in (1, 2, 3):
            yield Row("training", "", "", times * .6, "tokens/s", times * share, fitted=True)
        yield Row("training", "", "", .9, "tokens/s", share)
    assert plan_check.best(made) == .6


def test_a_page_gets_the_summary_between_its_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{plan_check.MARK}\nold\n{plan_check.MARK}\nafter\n")
    put_between(page, plan_check.MARK, plan_check.markdown(RECORDED))
    first, table, last = page.read_text().split(plan_check.MARK)
    assert (first, table.strip(), last) == ("before\n", plan_check.markdown(RECORDED), "\nafter\n")


def test_docs_have_what_the_record_has():
    page = (plan_check.ROOT / "docs" / "distributed.md").read_text()
    assert page.split(plan_check.MARK)[1].strip() == plan_check.markdown(RECORDED)
