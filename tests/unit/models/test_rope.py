"""Rotary tables against transformers' for every kind we accept, and refusal of the others' fields."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.paged import rope_tables
from tinygrad_nv.models.rope import RopeConfig, tables

INTEGERS = {2: dtypes.uint16, 4: dtypes.uint32}

KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128},
    "llama3.2": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                    "mscale_all_dim": 0.8, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
                 "short_factor": [1.0] * 16, "long_factor": [1 + i / 4 for i in range(16)]},
}


def parameters(kind: str, theta: float) -> dict[str, object]:
    return {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 256, "rope_parameters": {"rope_theta": theta, **KINDS[kind]}}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str, theta: float):
    fields = parameters(kind, theta)
    config = LlamaConfig(**fields)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 256, 64), torch.arange(256)[None])
    ours = tables(parse_config({"architectures": ["LlamaForCausalLM"], **fields}).ropes[0], 256)
    # angles up to 256 rad in float32: 2^-15 rad of rounding between two libraries' pow
    np.testing.assert_allclose(ours[0], cos[0, :, :16].numpy(), atol=2 ** -15, rtol=0)
    np.testing.assert_allclose(ours[1], sin[0, :, :16].numpy(), atol=2 ** -15, rtol=0)


def test_old_and_new_spellings_are_one_configuration():
    new = parameters("llama3", 500000.0)
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | {
        "rope_theta": 500000.0, "rope_scaling": {**KINDS["llama3"], "type": "llama3"}}
    assert parse_config({"architectures": ["LlamaForCausalLM"], **old}) == parse_config(
        {"architectures": ["LlamaForCausalLM"], **new})


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16])
def test_tables_are_rounded_as_tinygrad_rounds(dtype: DType):
    rope = RopeConfig("default", 10000.0, 64, 512)
    made = rope_tables((rope,), 512, 512, dtype, "CPU")[0]
    for ours, exact in zip(made, tables(rope, 512), strict=True):
        theirs = Tensor(exact, device="CPU").cast(dtype)
        assert (ours.dtype, ours.shape) == (dtype, exact.shape)
        assert np.array_equal(ours.bitcast(INTEGERS[dtype.itemsize]).numpy(),
                              theirs.bitcast(INTEGERS[dtype.itemsize]).numpy())
