"""Which rank is what. What a run says where a package that it would use is missing."""
from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.layout import AXES, Layout, Place, layout_of
from tinygrad_nv.train.log import Log


def test_places() -> None:
    """The tensor axis counts fastest, the data axis slowest."""
    layout = Layout(data=2, pipeline=1, context=3, tensor=2)
    assert layout.size == 12
    assert [layout.place(rank) for rank in (0, 1, 2, 6, 11)] == [
        Place(), Place(tensor=1), Place(context=1), Place(data=1), Place(1, 0, 2, 1)]
    assert [layout.rank(layout.place(rank)) for rank in range(12)] == list(range(12))
    assert list(layout.axes) == list(AXES)


def test_members() -> None:
    """Ranks that differ in some axes alone; together they are all, each once."""
    layout = Layout(2, 2, 1, 3)
    assert layout.members(4, "tensor") == (3, 4, 5)
    assert layout.members(4, "data") == (4, 10)
    assert layout.members(4, "tensor", "data") == layout.members(4, "data", "tensor") == (3, 4, 5, 9, 10, 11)
    assert layout.members(4) == (4,)
    for axes in product(AXES, AXES):
        found = sorted({layout.members(rank, *axes) for rank in range(12)})
        assert sorted(rank for each in found for rank in each) == list(range(12))


def test_what_counts_once() -> None:
    layout = Layout(data=2, tensor=2)
    assert [layout.counts(rank) for rank in range(4)] == [True, False, True, False]
    assert [layout.keeper(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_started_ranks() -> None:
    for given, started, data in ((0, 1, 1), (0, 3, 3), (3, 3, 3)):
        assert layout_of(TrainingArguments(data_parallel_size=given), started) == Layout(data=data)
    with pytest.raises(ConfigError, match="3 ranks"): layout_of(TrainingArguments(data_parallel_size=3), 2)


def test_no_curves_are_drawn_without_matplotlib_and_a_line_says_so(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with Log(TrainingArguments(output_dir=str(tmp_path), report_to="none"), 1, 0) as log: log.finish()
    assert capsys.readouterr().err == \
        "no curves.png: it needs matplotlib (pip install 'tinygrad-nv[train]')\n"
    assert not (tmp_path / "curves.png").exists()


def test_the_time_that_is_left_leaves_out_compiling(tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps that compile take a minute each; ten of two seconds then predict the 88 that are left."""
    row = {"loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1.0, "memory_bytes": 1}
    with Log(TrainingArguments(output_dir=str(tmp_path), report_to="none"), 100, 0) as log:
        for step in range(1, 13):
            log._printed = float("-inf")
            log.step({**row, "step": step, "seconds": 60.0 if step <= 2 else 2.0})
    lines = capsys.readouterr().err.splitlines()
    assert [line.endswith(" left") for line in lines] == [False, False, *[True] * 10]
    assert lines[-1].endswith("  0:02:56 left")
