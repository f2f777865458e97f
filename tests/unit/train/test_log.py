"""What a run says where a package that it would use is missing."""
import sys
from pathlib import Path

import pytest

from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.log import Log


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
