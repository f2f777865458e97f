"""`tinygrad-nv quantize` with calibration: transformers and this package read the result alike, an
interrupted run goes on, and outputs of layers change less than if weights are rounded to the nearest. Its
report: what transformers predicts of the same text, before and after."""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.cli.quantize_case import logits, same_layers
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.models.config import read_config
from tinygrad_nv.quantize import calibrate, quality
from tinygrad_nv.quantize.files import unwritable
from tinygrad_nv.quantize.quality import affordable, compare, perplexity
from tinygrad_nv.quantize.text import Sequences, stories, tokens

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


TEXTS = ("The fox met a small bear. They played until the sun went down.",
         "One day a little fox lived in a wood.")
SIZES = ("--scheme", "w4a16", "--group-size", "32")


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


def scores(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """transformers' ln p of all tokens at each position but the last of each text, and of those that came."""
    tokenizer, logs, chosen = AutoTokenizer.from_pretrained(directory), [], []
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text).input_ids, 1]])       # and the token that ends it
        with torch.no_grad(): log = model(ids).logits[0, :-1].double().log_softmax(-1)
        logs.append(log.numpy())
        chosen.append(log.gather(-1, ids[0, 1:, None]).numpy()[:, 0])
    return np.concatenate(logs), np.concatenate(chosen)


def test_it_is_what_transformers_predicts(command, tiny: Path, held_out: Path, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quality, "LOGITS", 7 * 300)    # tokens of a batch are fewer than those of a text
    out, file = tmp_path / "made", tmp_path / "report.json"
    said = command("quantize", tiny, "--out", out, *SIZES, "--held-out", held_out, "--report",
                   file).succeeded()
    made = json.loads(file.read_text())
    assert (out / "quantization_report.json").read_bytes() == file.read_bytes()
    (before, first), (after, second) = scores(tiny), scores(out)
    assert made["tokens"] == len(first)
    assert made["perplexity"]["before"] == pytest.approx(math.exp(-first.mean()), rel=1e-5)
    assert made["perplexity"]["after"] == pytest.approx(math.exp(-second.mean()), rel=1e-5)
    assert made["perplexity"]["change"] == pytest.approx(math.exp(first.mean() - second.mean()) - 1, rel=1e-3)
    wanted = (np.exp(before) * (before - after)).sum(-1).mean()
    assert made["kl_divergence"] == pytest.approx(wanted, rel=1e-3)
    assert made["same_likeliest_token"] == np.mean(before.argmax(-1) == after.argmax(-1))
    assert 0 < made["state_errors"][0] < made["state_errors"][1] < 1
    assert len(made["layer_errors"]) == 14
    for text in (f"{made['perplexity']['after']:.4f}", f"{made['tokens']} held-out tokens", "worst layers"):
        assert text in said.out


def test_one_model_by_itself(tiny: Path):
    """Every sequence starts anew, and its last token predicts nothing."""
    text = Sequences(np.array([0, 7, 8, 9, 0, 30, 31]), (4, 3))
    apart = [perplexity(tiny, Sequences(text.ids[a:b], (b - a,))) for a, b in ((0, 4), (4, 7))]
    assert math.log(perplexity(tiny, text)) == pytest.approx(
        (3 * math.log(apart[0]) + 2 * math.log(apart[1])) / 5, rel=1e-6)
    same = compare(tiny, tiny, text)
    assert (same.before, same.divergence, same.same, set(same.states)) == (same.after, 0, 1, {0})


def test_there_may_be_none(command, tiny: Path, copy: Path, tmp_path: Path):
    """The command leaves out a report that was not asked for, and says so, where there is no tokenizer."""
    command("quantize", tiny, "--out", tmp_path / "a", *SIZES, "--no-report").succeeded()
    assert not (tmp_path / "a" / "quantization_report.json").exists()
    (copy / "tokenizer.json").unlink()
    said = command("quantize", copy, "--out", tmp_path / "b", *SIZES).succeeded()
    assert "no report: " in said.err
    assert "has no tokenizer.json" in said.err
    assert not (tmp_path / "b" / "quantization_report.json").exists()
    for words in (("--report", tmp_path / "r.json"), ("--held-out", tmp_path / "none.txt")):
        command("quantize", copy, "--out", tmp_path / "c", *SIZES, *words).refused("to fix:")
    for words, found in ((("--report", "r.txt"), "a report in r.txt"),
                         (("--report", "r.json", "--no-report"), "a report that is asked for")):
        command("quantize", tiny, "--out", tmp_path / "c", *SIZES, *words).refused(found)
    assert not list(tmp_path.glob("c*"))


def test_large_models_are_not_evaluated_unasked(tiny: Path, spoil):
    assert affordable(read_config(tiny)) == quality.MOST
    large = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336}
    assert 2500 < affordable(read_config(spoil(**large, num_hidden_layers=6))) < quality.MOST
    assert affordable(read_config(spoil(**large, num_hidden_layers=32))) == 0


def change(command, out: Path, *words: str) -> float:
    """Of the perplexity of the model in the box."""
    said = command("quantize", DEFAULT_MODEL, "--out", out, "--json", "--samples", "96", *words).succeeded()
    found = json.loads(said.out)["quality"]
    return found["after"] / found["before"] - 1


@pytest.mark.slow
def test_what_the_model_in_the_box_loses(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """int8 at most 0.5 %, int4 3 %; GPTQ less than rounding to the nearest."""
    monkeypatch.setattr(quality, "MOST", 6000)      # tokens
    assert abs(change(command, tmp_path / "w8", "--scheme", "w8a16")) < 0.005
    found = [change(command, tmp_path / name, "--scheme", "w4a16", "--method", name)
             for name in ("rtn", "gptq")]
    assert 0 < found[1] < found[0] < 0.03


def test_a_picture(command, tiny: Path, held_out: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    command("quantize", tiny, "--out", tmp_path / "made", *SIZES, "--held-out", held_out, "--report",
            tmp_path / "r.png").succeeded()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command("quantize", tiny, "--out", tmp_path / "made", *SIZES, "--report", tmp_path / "r.png").refused(
        "matplotlib is not installed", "to fix:   pip install matplotlib, or name a .json file")
