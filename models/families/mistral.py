"""Mistral: a sliding window in every layer, or in none; no biases, whatever config.json says."""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from .family import Family


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    window = None if f.get("sliding_window") is None else f.positive("sliding_window")
    return {"qkv_bias": False, "output_bias": False, "windows": (window,) * f.positive("num_hidden_layers")}


FAMILY = Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}, settings=settings)
