"""Scales of keys and values in a checkpoint: what a stored number of 8 bits is multiplied by.

Their names are those that writers have given them, and all mean the same:

    self_attn.k_scale, .v_scale             compressed-tensors, AutoFP8; vLLM's own name has .attn before it
    self_attn.k_proj.k_scale, .v_proj.v_scale           ModelOpt
    self_attn.k_proj.output_scale, .v_proj.output_scale     older compressed-tensors, Quark
    self_attn.kv_scale                      older AutoFP8: of both

A scale is of all heads, or there is one for each key head.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.floats import as_float32

from .checkpoint import FLOAT_BYTES, TensorEntry, read_array
from .config import ModelConfig

NAMES = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "qkv_proj.{x}_scale", "{x}_proj.output_scale",
         "kv_scale", "attn.kv_scale")
# of tensors that are no weights: those above, and scales of queries and of attention's weights
SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_output_scale", ".k_proj.output_scale",
            ".v_proj.output_scale")


def read_cache_scales(config: ModelConfig,
                      entries: Mapping[str, TensorEntry]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Scales of keys and of values, float32 [H_kv] each, of the layers that have both. Raises `WeightError`
    for one that is no scale."""
    made = {}
    for layer in range(config.num_layers):
        names = [[f"model.layers.{layer}.self_attn.{name.format(x=x)}" for name in NAMES] for x in "kv"]
        found = [next((entries[name] for name in each if name in entries), None) for each in names]
        keys, values = found
        if keys is None or values is None: continue
        made[layer] = _scales(config, keys), _scales(config, values)
    return made


def _scales(config: ModelConfig, entry: TensorEntry) -> np.ndarray:
    heads = config.num_kv_heads
    count = int(np.prod(entry.shape))
    if entry.dtype not in FLOAT_BYTES or count not in (1, heads):
        raise WeightError(f"{entry.name} is {entry.dtype} {list(entry.shape)}",
                          f"floats, one or one for each of {heads} key heads",
                          "use the config.json that belongs to these weights, or quantise the cache again")
    made = as_float32(read_array(entry)).reshape(-1)
    if not (np.isfinite(made) & (made > 0)).all():
        raise WeightError(f"{entry.name} is {made.tolist()}", "numbers above 0",
                          "quantise keys and values again, with data")
    return np.broadcast_to(made, (heads,))
