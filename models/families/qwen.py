"""Qwen2, Qwen2.5 and Qwen3: windows in the layers from max_window_layers on, if use_sliding_window. Qwen2 has
biases of q, k and v whatever config.json says, Qwen3 norms of each head's queries and keys.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from .family import Family
from .layers import layer_types, windows


def windows_of(f: Fields) -> tuple[int | None, ...]:
    """Returns the window of each layer. Raises `ModelError`."""
    if f.get("sliding_window") is not None: f.positive("sliding_window")
    used = f.flag("use_sliding_window") and f.get("sliding_window") is not None
    first = f.count("max_window_layers", 28) if used else 0     # null in files without windows
    types = layer_types(f, lambda i: used and i >= first)
    return windows(f if used else f.within({"sliding_window": None}), types)


def qwen2(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Qwen 2."""
    return {"qkv_bias": True, "output_bias": False, "windows": windows_of(f)}


def qwen3(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Qwen 3."""
    return {"qk_norm": "head", "windows": windows_of(f)}


QWEN2 = Family("Qwen2ForCausalLM", {"num_key_value_heads": 32, "sliding_window": 4096}, settings=qwen2)
QWEN3 = Family("Qwen3ForCausalLM", {"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
               settings=qwen3)
