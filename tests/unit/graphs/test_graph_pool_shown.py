"""What a graph pool shows: its statistics as a table, a bar while it captures."""
from __future__ import annotations

import io
from functools import partial

import pytest
import rich.console

from tinygrad_nv import dtypes
from tinygrad_nv.graphs import BucketStats, GraphPool, GraphPoolStats, Input


def bucket(size: int, rows: int, padding: int, *reasons: str) -> BucketStats:
    return BucketStats(size, 5, 1, 2, 0.25, rows, padding, 7, 1, len(reasons), reasons, 3 << 20, 1 << 10,
                       4096)


def test_statistics_are_an_aligned_table():
    stats = GraphPoolStats("CUDA", (bucket(1, 4, 0), bucket(64, 120, 40, "because")), 3 << 20, 512, 1 << 10,
                           1024,
                      1 << 30)
    lines = str(stats).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["size", "1", "64"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[2].split() == ["64", "5", "1", "2", "0.25", "120", "25%", "7", "1", "1", "3.00", "MiB",
                                "1.00", "KiB", "4.00", "KiB"]
    assert lines[3] == ("CUDA: 3.01 MiB of 1.00 GiB in graphs (8.00 KiB), arena (3.00 MiB) and outputs "
                        "(1.00 KiB); inputs 512 B, page-locked 1.00 KiB")
    assert lines[4:] == ["size 64 without a whole graph: because"]
    assert stats.padding_waste == 40 / 164
    assert stats.hits == 10


def test_a_pool_that_never_ran_has_no_waste():
    assert GraphPoolStats("EMU", (bucket(1, 0, 0),), 0, 0, 0, 0, None).padding_waste == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_only_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]):
    shown = io.StringIO()
    made = partial(rich.console.Console, file=shown, force_terminal=terminal, width=120)
    monkeypatch.setattr(rich.console, "Console", lambda stderr: made())
    pool = GraphPool(lambda x: x + 1, {"x": Input((4,), dtypes.int32)}, (1, 2), "CPU")
    pool.capture()
    assert [stats.builds for stats in pool.stats().buckets] == [1, 1]
    text = shown.getvalue()
    assert ("graphs: size 2" in text, "graphs: size 1" in text, "held" in text) == (terminal,) * 3
    assert capsys.readouterr() == ("", "")
