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
