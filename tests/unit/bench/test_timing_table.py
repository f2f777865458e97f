"""bench/timing/table.py: its table, and the page that has it."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.lib.measure import put_between
from bench.timing import table as timing_table
from bench.timing.rows import Peer, Row


def record(us: float, **peers: float) -> dict[str, object]:
    best = min(peers, key=lambda name: peers[name])
    return {"row": "matmul bf16: 1 x 2 x 3", "us": us, "schedule": "", "limiter": "HBM", "tflops": 0.0,
            "gbytes_per_s": timing_table.HBM / 2, "peers": peers, "failed": {}, "best": best,
            "ratio": peers[best] / us}


def test_a_row_has_the_best_peer_and_the_share_of_bandwidth():
    (cells,) = timing_table.lines([record(10.0, slow=30.0, fast=12.0)])
    assert cells == ("matmul bf16: 1 x 2 x 3", "10.0", f"{timing_table.HBM / 2:.0f} GB/s, 50%", "HBM", "12.0",
                     "1.200", "fast")


def test_a_page_gets_the_table_between_its_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{timing_table.MARK}\nold\n{timing_table.MARK}\nafter\n")
    rows = [record(10.0, fast=12.0)]
    put_between(page, timing_table.MARK, timing_table.markdown(rows))
    first, table, last = page.read_text().split(timing_table.MARK)
    assert (first, table.strip(), last) == ("before\n", timing_table.markdown(rows), "\nafter\n")


def test_docs_have_what_the_record_has():
    rows = json.loads((timing_table.RESULTS / f"{timing_table.RECORD}.json").read_text())["rows"]
    page = (timing_table.ROOT / "docs" / "timing.md").read_text()
    assert page.split(timing_table.MARK)[1].strip() == timing_table.markdown(rows)


def test_a_row_keeps_peers_of_its_own_model_alone(monkeypatch: pytest.MonkeyPatch):
    launch = SimpleNamespace(seconds=1e-5, limiter="HBM")
    monkeypatch.setattr(timing_table, "ours", lambda _: ("a schedule", [launch]))
    monkeypatch.setattr(timing_table, "total_seconds", lambda launches, pdl=False: launches[0].seconds)
    row = Row("matmul bf16", "1 x 2 x 3", None, (Peer("theirs", lambda _: [], "their_checkout"),), flops=10)
    for model, peers in ((timing_table.model(), {"theirs": 12.0}), ("another", {})):
        found = timing_table.predict(row, {}, record(11.0, theirs=12.0) | {"model": model})
        assert (found["peers"], found["us"], found["model"]) == (peers, 10.0, timing_table.model())


def test_names_of_rows_are_unique():
    names = [str(row) for module in timing_table.MODULES for row in module.rows()]
    assert len(names) == len(set(names)) > 50


@pytest.mark.parametrize("words", ["nowhere", "nowhere:there"])
def test_a_checkout_that_is_not_there_is_named(words: str):
    with pytest.raises(Exception, match="nowhere is no folder"): timing_table.checkout(words)
