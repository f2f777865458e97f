"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 beside each other in every layer, and factors of what
goes into each of their parts.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..mixers.config import BesideConfig
from .family import Family, require_absent
from .mamba2 import BAMBA_NAMES, SIZES, mamba_config

FACTORS = ("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_out_multiplier",
           "attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")


def list_factors(f: Fields, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` factors, 1 where it is null. Raises `ModelError`."""
    if (given := f.get(key)) is None: return (1.0,) * count
    numbers = isinstance(given, list) and len(given) == count and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in given)
    if not numbers: raise ModelError(f"{f.name}: {key} is {brief(given)}", f"a list of {count} numbers")
    return tuple(map(float, given))


def falcon_h1(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    require_absent(f, "layer_types")
    head, embedding, key, outputs, inputs, ssm_in, ssm_out = (f.number(name) for name in FACTORS)
    scales = ssm_in, *list_factors(f, "ssm_multipliers", 5)
    gate, down = list_factors(f, "mlp_multipliers", 2)
    mamba = mamba_config(f, normalised=f.flag("mamba_rms_norm"), gates_last=f.flag("mamba_norm_before_gate"),
                         output_bias=f.flag("projectors_bias"), scales=scales if set(scales) != {1.0} else ())
    layers = f.positive("num_hidden_layers")
    return {"mixers": (BesideConfig(mamba, inputs, outputs, ssm_out),) * layers, "names": BAMBA_NAMES,
            "mlp_bias": f.flag("mlp_bias"), "mlp_scales": (gate, down), "embedding_scale": embedding,
            "logit_divisor": 1 / head, "attention_scale": f.positive("head_dim") ** -0.5 * key}


FAMILY = Family("FalconH1ForCausalLM",
                {**SIZES, **dict.fromkeys(FACTORS, 1.0), "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                 "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False},
                frozenset({"embedding_multiplier"}), falcon_h1)
