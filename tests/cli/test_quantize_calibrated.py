"""`tinygrad-nv quantize` with calibration: transformers and this package read the result alike, an
interrupted run goes on, and outputs of layers change less than if weights are rounded to the nearest."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.cli.quantize_case import logits, same_layers
from tinygrad_nv.models.config import read_config
from tinygrad_nv.quantize import calibrate
from tinygrad_nv.quantize.files import unwritable
from tinygrad_nv.quantize.text import stories, tokens

FEW = ("--samples", "12", "--length", "48", "--no-report")


@pytest.fixture(scope="module")
def source(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of bfloat16 in three files, heads of queries that share keys, biases of q, k and v."""
    out = tmp_path_factory.mktemp("source")
    made = make_model("Qwen2ForCausalLM", hidden_size=128, intermediate_size=256, initializer_range=0.05)
    model = AutoModelForCausalLM.from_pretrained(made).to(torch.bfloat16)
    torch.manual_seed(0)
    # some inputs are larger than others, as in models that were trained
    for name, tensor in model.state_dict().items():
        if "layernorm" in name: tensor *= torch.exp(torch.randn(tensor.shape)).to(tensor.dtype)
        if name.endswith("bias"): tensor += 0.1 * torch.randn(tensor.shape).to(tensor.dtype)
    model.save_pretrained(out, max_shard_size="300KB")
    for each in made.glob("*token*.json"): (out / each.name).write_bytes(each.read_bytes())
    assert len(list(out.glob("*.safetensors"))) == 3
    return out


def errors(command, source: Path, out: Path, *words: str) -> dict[str, float]:
    said = command("quantize", source, "--out", out, "--json", *FEW, *words).succeeded().out
    return {each["layer"]: each["error"] for each in json.loads(said)["layers"]}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}


GROUPS = ("--group-size", "32")
CASES = [("--scheme", "w4a16", "--method", "gptq", *GROUPS),
         ("--scheme", "w4a16", "--method", "gptq", *GROUPS, "--act-order", "none"),
         ("--scheme", "w4a16", "--method", "awq", *GROUPS),
         ("--scheme", "w8a8", "--method", "smoothquant"),
         ("--scheme", "w8a8", "--method", "gptq", "--static"),
         ("--scheme", "fp8", "--static")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[1:]))
def test_transformers_reads_it(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """The same logits; of inputs that are rounded, too, those of each layer, given the same."""
    out = tmp_path / "made"
    command("quantize", source, "--out", out, *FEW, *case).succeeded()
    wanted, found = same_layers(out), logits(out)
    close = 2e-5 if case[1] == "w4a16" else 0.05
    assert np.abs(found - wanted).max() < close * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [("awq",), ("gptq",), ("gptq", "--act-order", "group"),
                                  ("gptq", "--act-order", "none", "--asymmetric")], ids=" ".join)
def test_their_own_formats(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """Outputs change less than if weights are rounded to the nearest in the same format."""
    words = "--scheme", case[0], *case[1:], "--group-size", "32"
    found = errors(command, source, tmp_path / "made", *words)
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == case[0]
    assert config.get("desc_act", False) is ("group" in case)
    assert found.keys() == {f"model.layers.{i}.{name}" for i in range(2) for name in calibrate_names()}
    plain = tmp_path / "plain"
    zeros = ["--asymmetric"] * (case[0] == "awq" or "--asymmetric" in case)
    nearest = errors(command, source, plain, "--scheme", "w4a16", "--group-size", "32", *zeros)
    # of rounding to the nearest, weights' errors are outputs', about
    assert np.mean(list(found.values())) < 0.9 * np.mean(list(nearest.values()))
    text = tokens(source, read_config(source), stories("held-out"), 1, 200).ids.tolist()
    original, made = logits(source, text), logits(tmp_path / "made", text)
    assert np.linalg.norm(made - original) < 0.9 * np.linalg.norm(logits(plain, text) - original)


def calibrate_names() -> list[str]:
    return [name for names in calibrate.TOGETHER for name in names]


@pytest.mark.slow
def test_what_is_ignored_stays(command, source: Path, tmp_path: Path):
    """With the norms before it."""
    command("quantize", source, "--out", tmp_path / "made", "--scheme", "awq", "--group-size", "32", *FEW,
            "--ignore", "re:.*k_proj", "--ignore", "lm_head", "--ignore", "re:.*embed.*").succeeded()
    found, plain = tensors_of(tmp_path / "made"), tensors_of(source)
    for name in ("self_attn.k_proj.weight", "self_attn.k_proj.bias", "input_layernorm.weight"):
        assert torch.equal(found[f"model.layers.1.{name}"], plain[f"model.layers.1.{name}"])
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert not torch.equal(found[norm], plain[norm])
    assert np.isfinite(logits(tmp_path / "made")).all()


@pytest.mark.slow
def test_gptqs_config_names_what_is_ignored(command, source: Path, tmp_path: Path):
    said = command("quantize", source, "--out", tmp_path / "made", "--scheme", "gptq", *GROUPS, *FEW,
                   "--ignore", "re:.*1.mlp.up_proj", "--ignore", "lm_head", "--ignore",
                   "re:.*embed.*").succeeded()
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["dynamic"] == {r"-:model\.layers\.1\.mlp\.up_proj$": {}}
    assert np.isfinite(logits(tmp_path / "made")).all()
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["layer 1 of 2", "layer 2 of 2"]


def files(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_it_goes_on_after_the_last_whole_layer(command, source: Path, tmp_path: Path, scheme: str,
                                               monkeypatch: pytest.MonkeyPatch):
    """A disk that is full leaves no directory that loads; afterwards what was made is not made again, and the
    result is what a run at once makes."""
    calls, write = list[str](), calibrate.write

    def full(path: Path, *rest: Any) -> dict[str, int]:
        if calls: raise unwritable(path, OSError(28, "No space left on device"))
        calls.append(path.name)
        return write(path, *rest)
    words = "quantize", source, "--scheme", scheme, "--group-size", "32", *FEW, "--out"
    monkeypatch.setattr(calibrate, "write", full)
    command(*words, tmp_path / "made").refused("No space left on device", "to fix:   free some space")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "made.partial" / "config.json").exists()
    calls.clear()
    monkeypatch.setattr(calibrate, "write", lambda *given: calls.append(given[0].name) or write(*given))
    command(*words, tmp_path / "made").succeeded()
    assert calls == ["layer-00001.safetensors"]
    command(*words, tmp_path / "whole").succeeded()
    assert files(tmp_path / "made") == files(tmp_path / "whole")
    assert sorted(files(tmp_path / "made")) == sorted(files(source))


def test_a_file_of_conversations(command, tiny: Path, tmp_path: Path):
    """Another text gives other numbers; of texts and messages each is a sequence of its own."""
    lines = [{"text": "The fox met a bear."},
             {"messages": [{"role": "user", "content": "Where is the fox?"}]}]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in lines) + "\n\n")
    words = "quantize", tiny, "--scheme", "gptq", "--group-size", "32"
    command(*words, "--out", tmp_path / "a", "--calibration", path, "--no-report").succeeded()
    path.with_suffix(".txt").write_text("One day the fox met a small bear. " * 20)
    command(*words, "--out", tmp_path / "b", "--calibration", path.with_suffix(".txt"),
            "--no-report").succeeded()
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    name = "model.layers.1.mlp.down_proj.qweight"
    assert not torch.equal(a[name], b[name])
