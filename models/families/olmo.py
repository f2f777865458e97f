"""OLMo 2 and 3: norms of what attention and feed-forward give, not of what they get, and of all queries
and all keys together. OLMo 3 has a sliding window in three layers of four, whose rope is not scaled.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..names import Names
from .family import Family
from .layers import layer_types, ropes_by_type, windows

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
