"""Mixtral: Mistral with a mixture of experts in every layer."""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..moe_config import COUNTS, moe_config
from ..names import Names
from . import mistral
from .family import Family

NAMES = Names(router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}",
              expert_matrices=("w1", "w3", "w2"))


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    layers = [True] * f.positive("num_hidden_layers")
    return {**mistral.settings(f), "names": NAMES,
            "moe": moe_config(f, 8, "intermediate_size", layers)}


FAMILY = Family("MixtralForCausalLM",
                {"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
                frozenset(COUNTS), settings)
