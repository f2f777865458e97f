"""`tinygrad-nv train` over ranks: the command, and what it wrote."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

COMMAND = (sys.executable, "-m", "tinygrad_nv.cli", "train")
USUAL = ("--max-length", "32", "--learning-rate", "1e-2", "--per-device-train-batch-size", "2",
         "--report-to", "none", "--save-strategy", "no", "--max-steps", "4")
Make = Callable[[str], Path]


def token_ids(folder: Path) -> Path:
    """Windows of 32 tokens; the last batch of an epoch has some for rank 0 alone."""
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(7).integers(3, 300, 32 * 13).astype(np.uint16))
    return path


def trained(model: Path, data: Path, output: Path, *options: str, code: int = 0) -> str:
    """Runs the command: what it wrote."""
    done = subprocess.run([*COMMAND, str(model), str(data), *USUAL, "--output-dir", str(output), *options],
                          capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, "NUM_CPU_THREADS": "1"})
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def weights(output: Path) -> dict[str, np.ndarray]:
    found = sorted(output.glob("*model.safetensors"))
    assert len(found) == 1, found
    return {name: each.double().numpy() for name, each in load_file(found[0]).items()}


def same(output: Path, other: Path) -> None:
    """Weights to the bit, and the figures of each step."""
    a, b = weights(output), weights(other)
    for name, tensor in b.items(): np.testing.assert_array_equal(a[name], tensor, err_msg=name)
    for one, two in zip(log(output), log(other), strict=True):
        for key in ("step", "loss", "grad_norm", "eval_loss", "epoch"):
            if key in two: assert one[key] == pytest.approx(two[key], rel=1e-12), (two["step"], key)


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def described(folder: Path, **more: object) -> Path:
    """A directory with a config.json alone."""
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300,
              "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, **more}
    (model := folder / "model").mkdir()
    (model / "config.json").write_text(json.dumps(fields))
    return model


def apart(output: Path, other: Path) -> float:
    """The largest difference of weights, by the largest weight of each tensor."""
    a, b = weights(output), weights(other)
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max()) for name in b)


# an epsilon above gradients that are nothing but rounding: Adam makes whole steps of these
STEADY = ("--adam-epsilon", "1e-3", "--max-steps", "10", "--max-grad-norm", "0.5")


def near(output: Path, other: Path) -> None:
    """Losses and norms of each step within 1e-5, evaluations, too, and weights within 1e-4 of the largest."""
    for one, two in zip(log(output), log(other), strict=True):
        for key in ("step", "loss", "grad_norm", "eval_loss"):
            if key in two: assert one[key] == pytest.approx(two[key], rel=1e-5), (two["step"], key)
    assert apart(output, other) < 1e-4


def no_farther(output: Path, other: Path, regrouped: Path) -> None:
    """Losses, norms and weights part from one rank's no farther than 4 times as those of one rank with rows
    in other groups do. Of Muon: singular values that are nothing but rounding become 1."""
    def parted(one: Path, key: str) -> float:
        pairs = zip(log(one), log(other), strict=True)
        return max(abs(float(a[key] / b[key]) - 1) for a, b in pairs if key in b)
    for key in ("loss", "grad_norm"): assert parted(output, key) <= 4 * parted(regrouped, key) + 1e-5, key
    assert apart(output, other) <= 4 * apart(regrouped, other)
    first = [log(each)[0] for each in (output, other)]
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-5)
