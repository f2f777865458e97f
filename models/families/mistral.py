"""Mistral: a sliding window in every layer, or in none; no biases, whatever config.json says. Mixtral:
Mistral with a mixture of experts in every layer.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..layer_config import COUNTS, Names, moe_config
from .family import Family


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    window = None if f.get("sliding_window") is None else f.positive("sliding_window")
    return {"qkv_bias": False, "output_bias": False, "windows": (window,) * f.positive("num_hidden_layers")}


FAMILY = Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}, settings=settings)
NAMES = Names(router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}",
              expert_matrices=("w1", "w3", "w2"))


def mixtral(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Mixtral."""
    layers = [True] * f.positive("num_hidden_layers")
    return {**settings(f), "names": NAMES, "moe": moe_config(f, 8, "intermediate_size", layers)}


MIXTRAL = Family("MixtralForCausalLM",
                 {"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
                  "rope_theta": 1e6}, frozenset(COUNTS), mixtral)
