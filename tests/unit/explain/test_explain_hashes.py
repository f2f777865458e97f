"""Hashes of steps: the same in any process, others where a graph or a schedule differs."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.explain import Lowering, explain

PROGRAM = """
from tinygrad import Tensor
from tinygrad_nv import explain
for _ in range(3): (Tensor.ones(7, 5).contiguous() * 3).realize()      # another history
print(explain(step()).hash)
"""
STEP = """
def step(n=64, dtype="float32", scale=2.0):
    from tinygrad import Tensor, dtypes
    x, w = (Tensor.empty(n, 96, dtype=getattr(dtypes, dtype), device="CPU") for _ in range(2))
    return ((x @ w.T).relu() * scale).softmax().contiguous().cumsum(1)
"""
scope: dict[str, Any] = {}
exec(STEP, scope)


def lowering(**changes: Any) -> Lowering: return explain(scope["step"](**changes))


def test_another_process_has_the_same_hash() -> None:
    wanted = lowering().hash
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", STEP + PROGRAM], capture_output=True, text=True,
                              check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.stdout.strip() == wanted


def test_what_differs_has_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [lowering(**each).hash for each in ({}, {"n": 65}, {"dtype": "bfloat16"}, {"scale": 3.0})]
    monkeypatch.setenv("NV_NORM", "0")
    found.append(lowering().hash)
    monkeypatch.setenv("NV_CPU_ISA", "portable")    # another schedule
    found.append(lowering().hash)
    assert len(set(found)) == len(found)


def test_kernels_of_tinygrad_count() -> None:
    x = Tensor.empty(100, device="CPU")
    assert explain(x.cumsum()).hash != explain(x.cumsum() + 1).hash
    assert explain(x.cast(dtypes.int32)).hash == explain(x.cast(dtypes.int32)).hash


def test_the_command(command: Any, tiny: Path) -> None:
    lines = command("explain", tiny, "--hash", "--device", "CPU").succeeded().out.splitlines()
    assert lines[0].split() == ["kernel", "graph", "schedule", "times"]
    assert lines[-1].startswith("step ")
    assert lines == command("explain", tiny, "--hash", "--device", "CPU").succeeded().out.splitlines()
    other = command("explain", tiny, "--hash", "--prefill", "9", "--device", "CPU").succeeded().out
    assert other.splitlines()[-1] != lines[-1]
    command("explain", tiny, "--hash", "--level", "c").refused("--hash with")
