"""Llama 4: the size of chunks, their pattern and the temperature are llama.cpp's own. Models of 128 experts
do not normalise queries and keys."""
from __future__ import annotations

from typing import Any

from ..families.layers import FULL
from ..families.llama4 import CHUNKED, NAMES
from .architecture import PATTERN, Architecture, Metadata

WINDOW = "attention.sliding_window"
CHUNK = 8192
UNNORMALISED = 128      # experts


def settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json."""
    if m.get(WINDOW, CHUNK) not in (CHUNK,): raise m.refusal(WINDOW, f"{CHUNK}, or none")
    types = [FULL if each == FULL else CHUNKED for each in m.layer_types(4)]
    return {"layer_types": types, "use_qk_norm": m.get("expert_count") != UNNORMALISED}


ARCHITECTURE = Architecture(
    "Llama4ForCausalLM", NAMES,
    {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
     "interleave_moe_layer_step": "interleave_moe_layer_step"},
    frozenset({WINDOW, PATTERN}), settings=settings,
    fixed={"attention_chunk_size": CHUNK, "attn_temperature_tuning": True, "floor_scale": 8192,
           "attn_scale": 0.1, "no_rope_layer_interval": 4})
