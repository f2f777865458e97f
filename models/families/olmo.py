"""OLMo 2 and 3: norms of what attention and feed-forward give, not of what they get, and of all queries
and all keys together. OLMo 3 has a sliding window in three layers of four, whose rope is not scaled.
OLMoE: a mixture of experts in every layer, norms of all queries and all keys together.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError

from ..fields import Fields
from ..layer_config import COUNTS, Names, moe_config
from .family import Family, layer_types, ropes_by_type, windows

NAMES = Names(attention_norm="", attention_post_norm="post_attention_layernorm", feed_forward_norm="",
              feed_forward_post_norm="post_feedforward_layernorm")
THETA = 500_000.0       # of OLMo 3


def second(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for OLMo 2."""
    return {"names": NAMES, "qk_norm": "all", "norm_rounds_last": True}


def third(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for OLMo 3."""
    types = layer_types(f, lambda i: (i + 1) % 4 != 0)
    return {**second(f), "windows": windows(f, types),
            "ropes": ropes_by_type(f, types, f.get("rope_theta", THETA), THETA)}


OLMO2 = Family("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, settings=second)
OLMO3 = Family("Olmo3ForCausalLM", {"rms_norm_eps": 1e-5, "sliding_window": 4096}, settings=third)


def olmoe(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for OLMoE."""
    layers, hidden = [True] * f.positive("num_hidden_layers"), f.positive("hidden_size")
    if f.positive("num_attention_heads") * f.positive("head_dim") != hidden:
        raise ModelError(f"{f.name}: head_dim is {f.get('head_dim')}, and queries are normalised together",
                         f"heads of hidden_size, {hidden}, elements together", "correct the file")
    return {"qk_norm": "all", "moe": moe_config(f, 64, "intermediate_size", layers,
                                                renormalize=f.flag("norm_topk_prob"))}


OLMOE = Family("OlmoeForCausalLM", {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5}, frozenset(COUNTS), olmoe)
