"""The report of `tinygrad-nv quantize`: what transformers predicts of the same text, before and after."""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.models.config import read_config
from tinygrad_nv.quantize import quality
from tinygrad_nv.quantize.quality import affordable, compare, perplexity
from tinygrad_nv.quantize.text import Sequences

TEXTS = ("The fox met a small bear. They played until the sun went down.",
         "One day a little fox lived in a wood.")
GROUPS = ("--scheme", "w4a16", "--group-size", "32")


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
    said = command("quantize", tiny, "--out", out, *GROUPS, "--held-out", held_out, "--report",
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
    """Where there is no tokenizer a report that was not asked for is left out, and the command says so."""
    command("quantize", tiny, "--out", tmp_path / "a", *GROUPS, "--no-report").succeeded()
    assert not (tmp_path / "a" / "quantization_report.json").exists()
    (copy / "tokenizer.json").unlink()
    said = command("quantize", copy, "--out", tmp_path / "b", *GROUPS).succeeded()
    assert "no report: " in said.err
    assert "has no tokenizer.json" in said.err
    assert not (tmp_path / "b" / "quantization_report.json").exists()
    for words in (("--report", tmp_path / "r.json"), ("--held-out", tmp_path / "none.txt")):
        command("quantize", copy, "--out", tmp_path / "c", *GROUPS, *words).refused("to fix:")
    for words, found in ((("--report", "r.txt"), "a report in r.txt"),
                         (("--report", "r.json", "--no-report"), "a report that is asked for")):
        command("quantize", tiny, "--out", tmp_path / "c", *GROUPS, *words).refused(found)
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
    command("quantize", tiny, "--out", tmp_path / "made", *GROUPS, "--held-out", held_out, "--report",
            tmp_path / "r.png").succeeded()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command("quantize", tiny, "--out", tmp_path / "made", *GROUPS, "--report", tmp_path / "r.png").refused(
        "matplotlib is not installed", "to fix:   pip install matplotlib, or name a .json file")
