"""MiniMax-M2: mixtures of experts in every layer, chosen by sigmoids with a bias, norms of all queries and
all keys together, and rope of a part of each head.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..fields import Fields
from ..layer_config import COUNTS, moe_config
from ..rope import rope_config, rope_parameters
from .family import Family
from .mistral import NAMES as MIXTRAL_NAMES

NAMES = replace(MIXTRAL_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias")


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    layers, head = f.positive("num_hidden_layers"), f.positive("head_dim")
    given = dict(rope_parameters(f))
    if f.get("rotary_dim") is not None and f.get("partial_rotary_factor") is None:
        given.setdefault("partial_rotary_factor", f.positive("rotary_dim") / head)
    moe = moe_config(f, 256, "intermediate_size", [True] * layers, score="sigmoid", choice_bias=True)
    return {"names": NAMES, "moe": moe, "qk_norm": "all", "qkv_bias": False, "output_bias": False,
            "ropes": (rope_config(f, given, head, partial=True),) * layers}


FAMILY = Family("MiniMaxM2ForCausalLM",
                {"num_key_value_heads": 8, "num_experts_per_tok": 8, "head_dim": 128, "rope_theta": 5e6},
                frozenset(COUNTS), settings)
