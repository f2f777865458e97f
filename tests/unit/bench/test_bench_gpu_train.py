"""The part "train" of bench/gpu/run.py: torch's functions agree with float64, what is wrong is found, and
what is predicted has a row."""
from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from bench.gpu import compare as gpu_compare
from bench.gpu import train as gpu_train
from bench.gpu.train_updates import Update

ROWS = {each.name: each for each in gpu_train.shapes()}


@pytest.mark.parametrize("name", ROWS)
def test_torch_is_right(name: str):
    """And what it is given to compile."""
    torch.manual_seed(0)
    small = ROWS[name].scale_down()
    given = small.make_inputs("cpu")
    if "numbers" in given[0]:   # torch adds up bfloat16 on a CPU: few whole numbers are exact
        for one in given: one["grad"].round_().clamp_(-1, 1)
    run = gpu_train.torch_eager(small, given, Namespace())
    assert gpu_compare.wrong(small, given, run) == ""
    if isinstance(small, Update): return
    run = gpu_train.bind_torch(given, small.compilable)
    assert gpu_compare.wrong(small, given, run) == ""
    for result in small.results:
        one = dict(given[0])
        one[result] = one[result] * 1.02
        assert result in small.unlike(one)


@pytest.mark.parametrize("change", ["g", "v"])
def test_a_wrong_step_is_found(change: str):
    small: Any = ROWS["AdamW GPT-2 124M f32"].scale_down()
    given = small.make_inputs("cpu")
    run = gpu_train.torch_eager(small, given, Namespace())
    before = given[0]["again"]

    def again() -> None:
        given[0][f"{change}1"].mul_(1.001)
        before()
        given[0][f"{change}1"].div_(1.001 if change == "g" else 1)

    given[0]["again"] = again
    assert small.unlike(given[0]) != ""
    run(0)


@pytest.mark.parametrize("name", ["silu·mul gradient 8192x14336", "norm weight gradient 8192x4096"])
def test_ours_is_right(name: str):
    row = gpu_train.run_emulated(ROWS[name], Namespace(arch="sm_90a", seed=0))
    assert row["status"] == "emulated", row["why"]


def test_rows_that_are_predicted():
    known = {name for name, each in ROWS.items() if gpu_train.predictions(each)}
    assert {"cross entropy 4096x50304 f32 → bf16", "AdamW GPT-2 124M bf16, masters",
            "norm of gradients GPT-2 124M bf16", "norm weight gradient 8192x4096",
            "rope gradient 1x8192, 32/8 heads of 128", "silu·mul gradient 8192x14336"} <= known
