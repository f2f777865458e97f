"""OLMoE: a mixture of experts in every layer, norms of all queries and all keys together."""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError

from ..fields import Fields
from ..moe_config import COUNTS, moe_config
from .family import Family


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    layers, hidden = [True] * f.positive("num_hidden_layers"), f.positive("hidden_size")
    if f.positive("num_attention_heads") * f.positive("head_dim") != hidden:
        raise ModelError(f"{f.name}: head_dim is {f.get('head_dim')}, and queries are normalised together",
                         f"heads of hidden_size, {hidden}, elements together", "correct the file")
    return {"qk_norm": "all", "moe": moe_config(f, 64, "intermediate_size", layers,
                                                renormalize=f.flag("norm_topk_prob"))}


FAMILY = Family("OlmoeForCausalLM", {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
                frozenset(COUNTS), settings)
