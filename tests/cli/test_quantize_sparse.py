"""`tinygrad-nv quantize --scheme 2:4` and `--sparsity 2:4`: transformers reads what it writes, either storage
has the same matrices, and the two largest of four are kept."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.cli.quantize_case import logits, same_layers

LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of bfloat16."""
    out = tmp_path_factory.mktemp("source")
    model = AutoModelForCausalLM.from_pretrained(make_model(hidden_size=64, intermediate_size=96))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


def fours(directory: Path) -> torch.Tensor:
    """The layer of a dense directory, in float32, four columns a row."""
    return load_file(directory / "model.safetensors")[f"{LAYER}.weight"].float().reshape(-1, 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [("2:4",), ("fp8", "--sparsity", "2:4"), ("w8a8", "--sparsity", "2:4")],
                         ids=" ".join)
def test_transformers_reads_it(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """And the same stored with a bitmask gives the same logits here, from half of the bytes."""
    dense, masked = tmp_path / "dense", tmp_path / "masked"
    command("quantize", source, "--scheme", *case, "--out", dense, "--no-report").succeeded()
    wanted = same_layers(dense)
    made = logits(dense)
    assert np.abs(made - wanted).max() < 0.1 * np.abs(wanted).max()
    command("quantize", source, "--scheme", *case, "--out", masked, "--no-report", "--format",
            "sparse-24-bitmask").succeeded()
    np.testing.assert_array_equal(logits(masked), made)
    tensors = load_file(masked / "model.safetensors")
    assert f"{LAYER}.weight" not in tensors
    assert tensors[f"{LAYER}.compressed"].shape == (64, 48)
    before, after = fours(source), fours(dense)
    assert ((after != 0).sum(1) == 2).all()
    if case[0] == "2:4":    # the two largest, as they were
        assert torch.equal(after.abs().sum(1), before.abs().topk(2, 1).values.sum(1))
        assert torch.equal(after, torch.where(after != 0, before, 0))


def test_the_report_and_the_config(command, source: Path, tmp_path: Path):
    out = tmp_path / "made"
    said = json.loads(command("quantize", source, "--scheme", "2:4", "--out", out, "--json").succeeded().out)
    error = float((fours(out) - fours(source)).norm() / fours(source).norm())
    assert next(each["error"] for each in said["layers"] if each["layer"] == LAYER) == \
        pytest.approx(error, rel=1e-3)
    found = json.loads((out / "config.json").read_text())["quantization_config"]["sparsity_config"]
    assert (found["format"], found["sparsity_structure"]) == ("dense", "2:4")
    assert found["ignore"] == ["lm_head"]


@pytest.mark.parametrize(("words", "found"), [
    (("--scheme", "w4a16", "--sparsity", "2:4"), "sparsity 2:4 of scheme w4a16"),
    (("--scheme", "fp8", "--sparsity", "1:4"), "sparsity '1:4'"),
    (("--scheme", "w8a8", "--method", "gptq", "--sparsity", "2:4"), "by method gptq"),
    (("--scheme", "w4a16", "--format", "sparse-24-bitmask"), "format sparse-24-bitmask of scheme w4a16")])
def test_what_does_not_go_together(command, source: Path, tmp_path: Path, words: tuple[str, ...], found: str):
    command("quantize", source, "--out", tmp_path / "made", *words).refused(found)
    assert list(tmp_path.iterdir()) == []
