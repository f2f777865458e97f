"""The network in NumPy: transformers' logits of plain directories, our own of quantised ones. Whole
directories in each format: what is loaded is what they stand for."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoModelForCausalLM

from tests.support.quant import directory_case
from tests.support.quant.directory_case import KINDS, write
from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.layers import Linear
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.activations import QWeight
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


def loaded(directory: Path) -> Llama:
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model


def linears(model: Llama) -> list[Linear]:
    return [linear for block in model.blocks
            for part in (block.attention, block.feed_forward)
            for linear in vars(part).values() if isinstance(linear, Linear)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded(kind: str, tmp_path: Path):
    quantised, plain = (linears(loaded(directory)) for directory in write(kind, tmp_path))
    for one, other in zip(quantised, plain, strict=True):
        parts = [part.matrix for part in one.parts if isinstance(part, QWeight)]
        assert len(parts) == len(one.parts) > 0
        # one matmul, with scales of a matrix, too; rows that are no whole blocks of 128 do not stack
        assert len(parts) == 1 or kind == "fp8"
        made = np.concatenate([part.dequantize().numpy() for part in parts])
        if kind == "ct-nvfp4": made = torch.from_numpy(made).bfloat16().float().numpy()
        assert np.array_equal(made, other.weight.numpy())


def test_modelopts_own_file(tmp_path: Path):
    """Of versions that leave config.json as it was."""
    quantised, plain = write("modelopt", tmp_path)
    data = json.loads((quantised / "config.json").read_text())
    config = data.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(data))
    (quantised / "hf_quant_config.json").write_text(json.dumps({
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": config["quant_algo"], "exclude_modules": ["lm_head"]}}))
    part = loaded(quantised).blocks[0].feed_forward.down.parts[0]
    assert isinstance(part, QWeight)
    assert np.array_equal(part.matrix.dequantize().numpy(),
                          loaded(plain).blocks[0].feed_forward.down.weight.numpy())
