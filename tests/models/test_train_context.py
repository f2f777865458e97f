"""`tinygrad-nv train --context-parallel-size`: losses, norms and weights of one rank, of the same rows."""
from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.models.train_ranks_case import (
    STEADY,
    Make,
    described,
    log,
    near,
    no_farther,
    same,
    token_ids,
    trained,
)

CONTEXT = ("--context-parallel-size", "2")
FAMILIES = {"llama": {"num_key_value_heads": 1, "num_attention_heads": 2},
            "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_ids(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_two_ranks(data: Path, tmp_path: Path, family: str) -> None:
    """Rows of 30 tokens, which are padded to four chunks of 8, and evaluations."""
    model = described(tmp_path, **FAMILIES[family])
    given = ("--from-scratch", *STEADY, "--max-length", "30", "--eval-data", str(data), "--eval-batches", "2")
    trained(model, data, tmp_path / "one", *given)
    told = trained(model, data, tmp_path / "two", *given, *CONTEXT)
    assert "parameters to train over 2 ranks" in told
    near(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ("--zero-stage", "1"), ("--zero-stage", "2"), ("--zero-stage", "3"), ("--dtype", "float16"),
    ("--gradient-checkpointing",), ("--gradient-accumulation-steps", "2"), ("--optim", "muon"),
    ("--use-peft", "--lora-r", "2", "--lora-dropout", "0")], ids=" ".join)
def test_with_others(hf_model: Make, data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Whatever else a run has. Float16 rounds other sums, and is compared with itself sharded no nearer than
    its own steps of 2⁻¹¹."""
    model, given = hf_model("llama"), (*STEADY, *options)
    trained(model, data, tmp_path / "one", *given)
    trained(model, data, tmp_path / "two", *given, *CONTEXT)
    if "muon" in options:
        trained(model, data, tmp_path / "apart", *given, "--per-device-train-batch-size", "1",
                "--gradient-accumulation-steps", "2")
        return no_farther(tmp_path / "two", tmp_path / "one", tmp_path / "apart")
    if "--dtype" not in options and "--use-peft" not in options: near(tmp_path / "two", tmp_path / "one")
    for one, two in zip(log(tmp_path / "two"), log(tmp_path / "one"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=2 ** -11 if "--dtype" in options else 1e-5)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "2"])
def test_with_data_parallel_ranks(data: Path, tmp_path: Path, zero: str) -> None:
    """Two contexts of two ranks, against one rank with two micro-batches."""
    model, given = described(tmp_path, num_hidden_layers=2), ("--from-scratch", *STEADY)
    trained(model, data, tmp_path / "one", *given, "--gradient-accumulation-steps", "2")
    trained(model, data, tmp_path / "four", *given, *CONTEXT, "-dp", "2", "--zero-stage", zero)
    near(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
def test_resumed(data: Path, tmp_path: Path) -> None:
    """The bits of a run that never stopped; with one rank, which has the same parameters, as near as its
    sums are."""
    model = described(tmp_path)
    given = ("--from-scratch", *STEADY, "--save-strategy", "steps", "--save-steps", "4",
             "--save-total-limit", "9")
    trained(model, data, tmp_path / "whole", *given, *CONTEXT)
    for name, ranks in (("again", CONTEXT), ("one", ())):
        trained(model, data, tmp_path / name, *given, *CONTEXT)
        for step in (8, 10):
            shutil.rmtree(tmp_path / name / f"checkpoint-{step}")
        told = trained(model, data, tmp_path / name, *given, *ranks, "--resume-from-checkpoint", "latest")
        assert "steps 5 to 10" in told
    same(tmp_path / "again", tmp_path / "whole")
    near(tmp_path / "one", tmp_path / "whole")
