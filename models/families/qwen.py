"""Qwen2, Qwen2.5 and Qwen3: windows in the layers from max_window_layers on, if use_sliding_window. Qwen2 has
biases of q, k and v whatever config.json says, Qwen3 norms of each head's queries and keys.

Qwen2-MoE and Qwen3-MoE have mixtures of experts in the layers that decoder_sparse_step and mlp_only_layers
leave, Qwen2-MoE a shared expert with a gate, and its windows in every other layer.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..layer_config import COUNTS, moe_config
from .family import Family, layer_types, windows


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


def mixtures(f: Fields) -> list[bool]:
    """For each layer whether it has experts. Raises `ModelError`."""
    step, key = f.positive("decoder_sparse_step"), "mlp_only_layers"
    dense = frozenset[int]() if f.get(key) is None else f.layers(key)
    return [i not in dense and (i + 1) % step == 0 for i in range(f.positive("num_hidden_layers"))]


def qwen2_moe(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Qwen 2 MoE."""
    used = f.flag("use_sliding_window")
    first = f.count("max_window_layers", 28) if used else 0
    types = layer_types(f, lambda i: used and i % 2 == 0 and i < first)
    moe = moe_config(f, 60, "moe_intermediate_size", mixtures(f),
                     f.positive("shared_expert_intermediate_size"), True, f.flag("norm_topk_prob"))
    return {"qkv_bias": f.flag("qkv_bias"), "output_bias": False, "moe": moe,
            "windows": windows(f if used else f.within({"sliding_window": None}), types)}


def qwen3_moe(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Qwen 3 MoE."""
    used = f.flag("use_sliding_window") and f.get("sliding_window") is not None
    window = f.positive("sliding_window") if used else None
    moe = moe_config(f, 128, "moe_intermediate_size", mixtures(f), renormalize=f.flag("norm_topk_prob"))
    return {"qk_norm": "head", "moe": moe, "windows": (window,) * f.positive("num_hidden_layers")}


QWEN2_MOE = Family("Qwen2MoeForCausalLM",
                   {"num_key_value_heads": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
                    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                    "qkv_bias": True, "sliding_window": 4096}, frozenset(COUNTS), qwen2_moe)
QWEN3_MOE = Family("Qwen3MoeForCausalLM",
                   {"num_key_value_heads": 4, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
                    "moe_intermediate_size": 768, "sliding_window": 4096}, frozenset(COUNTS), qwen3_moe)
