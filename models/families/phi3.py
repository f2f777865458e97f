"""Phi-3 and Phi-4 (mini): q|k|v and gate|up are stored as they are multiplied; a part of each head is
rotated."""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..layer_config import Names
from ..rope import rope_config, rope_parameters
from .family import Family

NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    layers, given = f.positive("num_hidden_layers"), rope_parameters(f)
    # in files of their first weeks "su" and "yarn" are what longrope became
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("su", "yarn"): given = {**given, "rope_type": (kind := "longrope")}
    if kind not in ("default", "longrope"):
        raise ModelError(f"{f.name}: rope type {brief(kind)} of a Phi-3 model", "default or longrope")
    window = None if f.get("sliding_window") is None else f.positive("sliding_window")
    rope = rope_config(f, given, f.positive("head_dim"), partial=True)
    return {"names": NAMES, "qkv_bias": False, "output_bias": False, "windows": (window,) * layers,
            "ropes": (rope,) * layers}


FAMILY = Family("Phi3ForCausalLM", {"rms_norm_eps": 1e-5}, settings=settings)
