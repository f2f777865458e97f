"""GGUF files as models: hyper-parameters and weights equal those that transformers makes of the file, and of
the directory that it was converted from."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tinygrad import Tensor, dtypes
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.support.quant.gguf_case import gguf_name, write_model
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import parse_config, read_config
from tinygrad_nv.models.gguf import hugging_face_name
from tinygrad_nv.models.layers import lookup_quantised
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised.layers import projections
from tinygrad_nv.models.rope import inverse_frequencies
from tinygrad_nv.models.weights import slots
from tinygrad_nv.quant.activations import QWeight

SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 64}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "gemma": ("Gemma", {"head_dim": 64}),
}
QUANTISED = {"Q4_0": Kind.Q4_0, "Q8_0": Kind.Q8_0, "Q6_K": Kind.Q6_K,
             "Q4_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.weight": Kind.Q6_K,
                        "": Kind.Q4_K},
             "mixed": {"attn_k": Kind.F16, "ffn_gate": Kind.F32, "token_embd": Kind.Q4_K, "": Kind.IQ4_XS}}
Directories = dict[str, Path]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A model of each family, with norms and biases that differ from 1 and 0."""
    made = {}
    for name, (family, fields) in FAMILIES.items():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter_name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in parameter_name else 0.0
            if parameter.ndim == 1: torch.nn.init.normal_(parameter, mean, 0.3)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def theirs(path: Path) -> dict[str, np.ndarray]:
    """The weights that transformers makes of a file, in float32."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"): model = transformers.AutoModelForCausalLM.from_config(config)
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    return {name: np.asarray(tensor, np.float32) for name, tensor in found.items()}


def ours(path: Path) -> dict[str, np.ndarray]:
    """All weights of a loaded model in float32, by Hugging Face's names."""
    model = Llama(read_config(path), device="CPU")
    weights.load(model, path)
    whole = {}
    for each in (one for layer in range(len(model.blocks)) for one in projections(model, layer)):
        parts = [part.matrix.dequantize() if isinstance(part, QWeight) else part
                 for part in each.linear.parts]
        if parts: whole[id(each.linear.weight)] = Tensor.cat(*parts, dim=0)
    if model.quantised_head is not None:
        head = model.quantised_head.matrix.dequantize()
        whole[id(model.head)] = head
    if model.quantised_embedding is not None:
        if model.config.tied: assert model.quantised_embedding is model.quantised_head.matrix
        every = Tensor(np.arange(model.config.vocab_size, dtype=np.int32), device="CPU")
        whole[id(model.embedding)] = lookup_quantised(model.quantised_embedding, every, dtypes.float32)
    return {name: whole.get(id(slot.tensor), slot.tensor)[slot.first:slot.first + slot.shape[0]].numpy()
            for name, slot in slots(model).items()}


def require_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].view(np.uint32), values.view(np.uint32)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_hyper_parameters_are_those_of_the_directory(directories: Directories, tmp_path: Path, family: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family])
    found, expected = read_config(path), read_config(directories[family])
    assert np.float32(found.norm_eps) == np.float32(expected.norm_eps)
    if family == "mistral": expected = replace(expected, architecture="LlamaForCausalLM")
    if family == "llama3":
        rates = [inverse_frequencies(each.ropes[0], 1) for each in (found, expected)]
        assert np.allclose(*rates, rtol=1e-6, atol=0)
        found = replace(found, ropes=expected.ropes)
    same = {"norm_eps": expected.norm_eps, "dtype": expected.dtype, "eos_token_ids": expected.eos_token_ids}
    assert replace(found, **same) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_hyper_parameters_are_those_of_transformers(directories: Directories, tmp_path: Path, family: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family], metadata={"tokenizer.ggml.eos_token_id": 7})
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    data = {**config.to_dict(), "architectures": [f"{FAMILIES[family][0]}ForCausalLM"]}
    assert replace(read_config(path), dtype=None) == replace(parse_config(data), dtype=None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_floats_are_those_of_the_directory(directories: Directories, tmp_path: Path, family: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family])
    expected = ours(directories[family])
    if family == "gemma":   # 1 is added and subtracted
        expected = {name: values + np.float32(1) - np.float32(1) if "norm" in name else values
                    for name, values in expected.items()}
    require_same(ours(path), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kinds", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_are_those_of_transformers(directories: Directories, tmp_path: Path, family: str, kinds: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family], QUANTISED[kinds])
    expected = theirs(path)
    if family == "qwen2": expected.pop("lm_head.weight", None)
    require_same(ours(path), expected)


def test_names(directories: Directories):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    model = Llama(read_config(directories["qwen3"]), device="CPU")
    for name in slots(model):
        stem, _, suffix = name.rpartition(".")
        assert gguf_name(name) == f"{names.get_name(stem)}.{suffix}"
        assert hugging_face_name(gguf_name(name)) == name
    assert hugging_face_name("blk.0.attn_sinks.weight") == "model.layers.0.self_attn.sinks"
    assert hugging_face_name("blk.0.ssm_a.weight") == "blk.0.ssm_a.weight"
