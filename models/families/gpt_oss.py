"""gpt-oss: attention sinks, a sliding window in every other layer, biases, and experts in every layer with a
clamped gate, stored as one tensor a layer.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.tile.grouped_gemm.spec import ALPHA, LIMIT

from ..fields import Fields, activation
from ..layer_config import COUNTS, Names, moe_config
from ..rope import rope_config, rope_parameters
from .family import Family, layer_types, windows

NAMES = Names(router="mlp.router", fused="interleaved")
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    for name, value in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if f.get(name) != value:
            raise ModelError(f"{f.name}: {name} is {brief(f.get(name))}, which is not implemented",
                             f"{value:g}", "use a model of this family as it was published")
    activation(f, "hidden_act")     # which transformers checks, and does not use
    layers = f.positive("num_hidden_layers")
    rope = rope_config(f, rope_parameters(f) or YARN, f.positive("head_dim"))
    return {"names": NAMES, "sinks": True, "norm_rounds_last": True, "activation": "swiglu_clamped",
            "windows": windows(f, layer_types(f, lambda i: i % 2 == 0)), "ropes": (rope,) * layers,
            "moe": moe_config(f, 128, "intermediate_size", [True] * layers, renormalize=False,
                              score="chosen", biased=True)}


FAMILY = Family("GptOssForCausalLM",
                {"head_dim": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "attention_bias": True,
                 "sliding_window": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
                 "rope_theta": 150_000.0, "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT},
                frozenset(COUNTS), settings)
