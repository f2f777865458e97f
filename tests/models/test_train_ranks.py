"""`tinygrad-nv train` over ranks: the bits of one rank, whatever is killed on the way."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

COMMAND = (sys.executable, "-m", "tinygrad_nv.cli", "train")
USUAL = ("--max-length", "32", "--learning-rate", "1e-2", "--per-device-train-batch-size", "2",
         "--report-to", "none", "--save-strategy", "no", "--max-steps", "4")
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of token ids; the last batch of an epoch has some for rank 0 alone."""
    path = tmp_path_factory.mktemp("data") / "ids.npy"
    np.save(path, np.random.default_rng(7).integers(3, 300, 32 * 13).astype(np.uint16))
    return path


def trained(model: Path, data: Path, output: Path, *options: str, code: int = 0) -> str:
    """Runs the command: what it wrote."""
    done = subprocess.run([*COMMAND, str(model), str(data), *USUAL, "--output-dir", str(output), *options],
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def weights(output: Path) -> dict[str, np.ndarray]:
    found = sorted(output.glob("*model.safetensors"))
    assert len(found) == 1, found
    return dict(load_file(found[0]))


def same(output: Path, other: Path) -> None:
    """Weights to the bit, and the figures of each step."""
    a, b = weights(output), weights(other)
    for name, tensor in b.items(): np.testing.assert_array_equal(a[name], tensor, err_msg=name)
    for one, two in zip(log(output), log(other), strict=True):
        for key in ("step", "loss", "grad_norm", "eval_loss", "epoch"):
            if key in two: assert one[key] == pytest.approx(two[key], rel=1e-12), (two["step"], key)


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_two_ranks_have_the_bits_of_one(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """One micro-batch on each of two ranks, and two on one; the evaluation, too. Rank 0 alone writes."""
    model, more = hf_model("llama"), ("--eval-data", str(data))
    trained(model, data, tmp_path / "one", *more, "--gradient-accumulation-steps", "2")
    told = trained(model, data, tmp_path / "two", *more, "-dp", "2")
    same(tmp_path / "two", tmp_path / "one")
    assert told.count("parameters to train over 2 ranks") == 1
    assert f"{tmp_path / 'two'}: 4 steps in" in told
