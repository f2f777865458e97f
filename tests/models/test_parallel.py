"""The bundled model on several ranks: the tokens are those of one."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import parallel_program
import pytest
from tinygrad_nv.models import tales

TALES = Path(tales.__file__).parent


@pytest.fixture(scope="module")
def alone() -> list[object]: return parallel_program.answers(str(TALES))


@pytest.mark.parametrize("options", [
    {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "speculative": "ngram:3"},
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 4}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 4}, marks=pytest.mark.slow)], ids=str)
def test_tokens(options: dict[str, object], alone: list[object]) -> None:
    program = str(Path(parallel_program.__file__))
    done = subprocess.run([sys.executable, program, str(TALES), json.dumps(options)], capture_output=True,
                          text=True, check=False, timeout=300, env={**os.environ, "NV_PROGRAM_CACHE": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == alone, done.stderr
