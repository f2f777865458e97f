"""Tensor parallel decoding on emulated GPUs: the tokens of one, with sums by NCCL's stand-in and by kernels
over the memory of peers, traced and kept on disk; and stages of a pipeline."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import SUPPORT

MODEL = Path(__file__).parents[2] / "models" / "tales"


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "kind"), [("auto", "tensor"), ("nccl", "tensor"), ("auto", "pipeline")])
def test_tokens_are_those_of_one_gpu(setting: str, kind: str, monkeypatch: pytest.MonkeyPatch,
                                     tmp_path: Path) -> None:
    monkeypatch.setenv("NV_ALL_REDUCE", setting)
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    program = str(SUPPORT / "models" / "parallel_gpus_program.py")
    for start in ("first", "second"):
        command = [sys.executable, program, str(MODEL), start, f"{kind}_parallel_size"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.endswith("all right\n")
