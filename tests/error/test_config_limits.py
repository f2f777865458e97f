"""Numbers of config.json that no model has: refused early, with the field and its limit."""
from __future__ import annotations

from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv.engine.loading import context_length
from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.encoder_config import parse_encoder_config

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
                         "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "hidden_act": "silu"}


@pytest.mark.parametrize(("key", "value", "limit"), [
    ("num_hidden_layers", 10**9, "at most 2,048"), ("num_hidden_layers", 2049, "at most 2,048"),
    ("vocab_size", 10**15, "at most 67,108,864"), ("hidden_size", 2**62, "at most 67,108,864"),
    ("intermediate_size", 10**12, "at most 67,108,864"), ("num_attention_heads", 10**9, "at most 65,536"),
    ("num_key_value_heads", 10**9, "at most 65,536"), ("max_position_embeddings", 10**18,
                                                       "at most 2,147,483,648"),
    ("head_dim", 10**10, "at most"), ("num_hidden_layers", 10**4000, "at most 2,048"),
    ("num_hidden_layers", 2.0, "a positive integer"), ("num_attention_heads", 0, "a positive integer"),
    ("num_attention_heads", -4, "a positive integer"), ("num_hidden_layers", [0] * 10**6,
                                                        "a positive integer")],
    ids=str)
def test_a_number_beyond_its_limit(key: str, value: Any, limit: str) -> None:
    with pytest.raises(ModelError) as error: parse_config({**LLAMA, key: value}, "config.json")
    assert error.value.found.startswith(f"config.json: {key} is ")
    assert limit in error.value.expected
    assert len(error.value.found) < 400


def test_numbers_at_their_limits_are_read() -> None:
    assert parse_config({**LLAMA, "num_hidden_layers": 2048}).num_layers == 2048
    assert parse_config({**LLAMA, "max_position_embeddings": 10_485_760}).max_positions == 10_485_760


def test_a_context_is_bounded_without_being_asked_for() -> None:
    def longest(**fields: Any) -> int:
        config = parse_config({**LLAMA, "max_position_embeddings": 1 << 31, **fields})
        return context_length(config, dtypes.float32, None)
    # of two dimensions a head 2 GiB of keys and values are 44 million tokens
    assert longest(num_hidden_layers=1, head_dim=2) == 1 << 20
    # tables of 4 bytes for each of 4096 dimensions
    assert longest(num_hidden_layers=1, num_key_value_heads=1, head_dim=4096) == (256 << 20) // (4 * 4096)
    assert longest(num_hidden_layers=1, head_dim=2, max_position_embeddings=4096) == 4096


def test_encoders_have_the_limits_too() -> None:
    bert = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 10**9,
            "intermediate_size": 64, "max_position_embeddings": 64, "type_vocab_size": 2,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000000"):
        parse_encoder_config(bert, "BertModel", "config.json")
