"""The network in NumPy: transformers' logits of plain directories, our own of quantised ones."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoModelForCausalLM

from tests.support.quant import directory_case
from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quantize import network
from tinygrad_nv.quantize.network import Source, advance, batches

LENGTHS = (33, 2, 17)
IDS = np.random.default_rng(0).integers(0, 256, sum(LENGTHS))


def logits(directory: Path) -> np.ndarray:
    source = Source(directory, max(LENGTHS))
    x = source.embed(IDS)
    for index in range(source.config.num_layers): advance(source.block(index), x, LENGTHS)
    return source.head()(x)


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=2e-5 * float(np.abs(wanted).max()), rtol=0)


CASES = {
    "llama3": ("LlamaForCausalLM", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}), "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16}),
    "erf": ("LlamaForCausalLM", {"hidden_act": "gelu"})}


@pytest.mark.parametrize("case", CASES)
def test_plain_directories(make_model, case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "BATCH", 34)
    directory = make_model(CASES[case][0], **CASES[case][1])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    parts = np.split(IDS, np.cumsum(LENGTHS)[:-1])
    with torch.no_grad(): wanted = [model(torch.tensor(part)[None]).logits[0].numpy() for part in parts]
    close(logits(directory), np.concatenate(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq-8-bits", "ct-int8", "ct-fp8"])
def test_quantised_directories(tmp_path: Path, kind: str):
    directory, _ = directory_case.write(kind, tmp_path)
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    wanted = [model(Tensor([part.tolist()], dtype=dtypes.int32, device="CPU")).numpy()[0]
              for part in np.split(IDS, np.cumsum(LENGTHS)[:-1])]
    found, wanted = logits(directory), np.concatenate(wanted)
    # an input that lies between two codes may go the other way
    if kind.startswith("ct"): assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()
    else: close(found, wanted)


def test_batches_are_whole_sequences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "BATCH", 10)
    found = list(batches([4, 5, 20, 3, 7]))
    assert found == [(slice(0, 9), [4, 5]), (slice(9, 29), [20]), (slice(29, 39), [3, 7])]


def test_what_is_missing(make_model, tmp_path: Path, spoil):
    source = Source(spoil(), 8)
    del source.entries["model.layers.0.input_layernorm.weight"]
    with pytest.raises(WeightError, match=r"input_layernorm.weight is missing"): source.block(0)
    with pytest.raises(WeightError, match=r"mlp.gate_proj.weight: \[128, 64\], expected \[96, 64\]"):
        Source(spoil(intermediate_size=96), 8)
    with pytest.raises(ModelError, match="no such directory"): Source(tmp_path / "none", 8)
