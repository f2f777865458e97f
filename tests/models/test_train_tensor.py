"""`tinygrad-nv train` over tensor parallel ranks: the figures and the weights of one rank."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

COMMAND = (sys.executable, "-m", "tinygrad_nv.cli", "train")
# an epsilon above gradients that are nothing but rounding: Adam makes whole steps of these
USUAL = ("--from-scratch", "--max-length", "32", "--learning-rate", "1e-2", "--adam-epsilon", "1e-3",
         "--report-to", "none", "--save-strategy", "no", "--max-grad-norm", "0.5")
BATCH = ("--per-device-train-batch-size",)
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "initializer_range": 0.2}
MIXTRAL = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
                   "num_experts_per_tok": 2}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16,
                 "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "ids.npy"
    np.save(path, np.random.default_rng(7).integers(3, 300, 32 * 50).astype(np.uint16))
    return path


def refused(folder: Path, data: Path, name: str, steps: int, *options: str) -> str:
    """What a run that ends with an error says."""
    words = [*COMMAND, str(folder / "model"), str(data), *USUAL, "--max-steps", str(steps), "--output-dir",
             str(folder / name), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def trained(folder: Path, config: dict[str, Any], data: Path, name: str, steps: int, *options: str
            ) -> Path:
    """Trains the config's model: the output."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    words = [*COMMAND, str(model), str(data), *USUAL, "--max-steps", str(steps), "--output-dir",
             str(folder / name), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return folder / name


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, np.ndarray]:
    return {name: each.double().numpy() for name, each in load_file(output / "model.safetensors").items()}


def near(output: Path, other: Path, count: int, losses: float = 1e-5, most: float = 1e-4) -> None:
    """Losses of each step relatively, norms by 10 times that, and weights by the largest of each tensor."""
    ours, theirs = log(output), log(other)
    assert len(ours) == len(theirs) == count
    for one, two in zip(ours, theirs, strict=True):
        if "eval_loss" in two:
            assert one["eval_loss"] == pytest.approx(two["eval_loss"], rel=losses)
            continue
        assert one["loss"] == pytest.approx(two["loss"], rel=losses), one["step"]
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=10 * losses), one["step"]
    a, b = weights(output), weights(other)
    assert a.keys() == b.keys()
    for name in b: assert np.abs(a[name] - b[name]).max() <= most * np.abs(b[name]).max(), name


def test_two_ranks(data: Path, tmp_path: Path) -> None:
    """Llama, whose vocabulary is no multiple of two ranks' aligned parts."""
    one = trained(tmp_path, LLAMA, data, "one", 3, *BATCH, "2")
    two = trained(tmp_path, LLAMA, data, "two", 3, *BATCH, "2", "-tp", "2")
    near(two, one, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "options"), [
    pytest.param(LLAMA, ("-tp", "2", "-dp", "2"), id="llama-tp2-dp2"),
    pytest.param(LLAMA, ("-tp", "2", "--sequence-parallel"), id="llama-sp"),
    pytest.param(LLAMA, ("-tp", "2", "-dp", "2", "--zero-stage", "2"), id="llama-zero2"),
    pytest.param(LLAMA, ("-tp", "2", "--sequence-parallel", "--gradient-checkpointing"), id="llama-regions"),
    pytest.param(LLAMA, ("-tp", "4"), id="llama-shared-heads"),
    pytest.param(LLAMA | {"num_key_value_heads": 1}, ("-tp", "4", "--sequence-parallel"),
                 id="llama-one-head"),
    pytest.param(LLAMA | {"attention_bias": True, "mlp_bias": True}, ("-tp", "4"), id="llama-biases"),
    pytest.param(QWEN3, ("-tp", "2"), id="qwen3"),
    pytest.param(QWEN3, ("-tp", "2", "-dp", "2", "--sequence-parallel"), id="qwen3-sp-dp2"),
    pytest.param(MIXTRAL, ("-tp", "2"), id="mixtral"),
    pytest.param(MIXTRAL, ("-tp", "2", "--enable-expert-parallel"), id="mixtral-ep"),
    pytest.param(MIXTRAL, ("-tp", "2", "-dp", "2", "--enable-expert-parallel", "--sequence-parallel"),
                 id="mixtral-ep-sp-dp2")])
def test_ten_steps(data: Path, tmp_path: Path, config: dict[str, Any], options: tuple[str, ...]) -> None:
    """Two micro-batches on one rank, or one on each of two data parallel ones."""
    apart = "-dp" in options
    one = trained(tmp_path, config, data, "one", 10, *BATCH, "2", "--gradient-accumulation-steps", "2")
    two = trained(tmp_path, config, data, "two", 10, *BATCH, "2", "--gradient-accumulation-steps",
                  "1" if apart else "2", *options)
    near(two, one, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "options"), [
    pytest.param(LLAMA | {"attention_bias": True}, ("-tp", "4"), id="llama"),
    pytest.param(MIXTRAL, ("-tp", "2", "-dp", "2", "--enable-expert-parallel"), id="mixtral-ep"),
    pytest.param(QWEN3 | {"num_key_value_heads": 1}, ("-tp", "2"), id="qwen3")])
def test_new_weights(data: Path, tmp_path: Path, config: dict[str, Any], options: tuple[str, ...]) -> None:
    """Those of one rank, to the bit, when nothing is learnt; and again from the directory that was saved."""
    still = (*BATCH, "2", "--learning-rate", "0")
    one = weights(trained(tmp_path, config, data, "one", 1, *still))
    two = trained(tmp_path, config, data, "two", 1, *still, *options)
    shutil.copytree(two, tmp_path / "model", dirs_exist_ok=True)
    again = weights(trained(tmp_path, config, data, "again", 1, *still, *options, "--no-from-scratch"))
    for made in (weights(two), again):
        assert made.keys() == one.keys()
        for name, each in one.items(): np.testing.assert_array_equal(made[name], each, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-tp", "2"), ("-tp", "2", "-dp", "2", "--sequence-parallel"),
                                     ("-tp", "2", "-dp", "2", "--zero-stage", "1")], ids=str)
def test_resume(data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """A run that goes on has the bits of one that never stopped; other layouts are refused."""
    saving = ("--save-strategy", "steps", "--save-steps", "2", "--save-total-limit", "9", *BATCH, "2")
    whole = trained(tmp_path, QWEN3, data, "whole", 4, *saving, *options)
    shutil.copytree(whole / "checkpoint-2", tmp_path / "out" / "checkpoint-2")
    resumed = (*saving, "--resume-from-checkpoint", "latest")
    out = trained(tmp_path, QWEN3, data, "out", 4, *resumed, *options)
    a, b = weights(out), weights(whole)
    for name in b: np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert [row["step"] for row in log(out)] == [3, 4]
    shutil.copytree(whole / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    told = refused(tmp_path, data, "other", 4, *resumed, "--gradient-accumulation-steps",
                   "2" if "-dp" in options else "1")
    assert ("zero_stage is 1 there, and 0 here" if "--zero-stage" in options else
            "tensor_parallel_size is 2 there, and 1 here") in told


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-tp", "2"), ("-tp", "2", "--sequence-parallel")], ids=str)
def test_other_options(data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Smoothing, z-loss, evaluation, and rows whose length is no multiple of the ranks."""
    given = (*BATCH, "2", "--label-smoothing-factor", "0.1", "--z-loss", "0.01", "--eval-data", str(data),
             "--eval-batches", "2", "--max-length", "31")
    one = trained(tmp_path, LLAMA, data, "one", 4, *given)
    two = trained(tmp_path, LLAMA, data, "two", 4, *given, *options)
    near(two, one, 5)


@pytest.mark.slow
def test_bfloat16(data: Path, tmp_path: Path) -> None:
    """Losses of 32 steps are as near to float32's, by the root of their mean square, as 1.5 times those of
    one rank are. The largest of a few is chance."""
    exact = [row["loss"] for row in log(trained(tmp_path, LLAMA, data, "exact", 32, *BATCH, "2"))]
    found = []
    for name, options in (("one", ()), ("two", ("-tp", "2", "--sequence-parallel"))):
        made = trained(tmp_path, LLAMA, data, name, 32, *BATCH, "2", "--dtype", "bfloat16", *options)
        found.append(np.sqrt(np.mean((np.array([row["loss"] for row in log(made)]) - exact) ** 2)))
    assert found[1] <= 1.5 * found[0]
