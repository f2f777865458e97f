"""Models with Mamba-2's state spaces. Mamba-2: these alone, a layer each. Bamba: with attention in some
layers, of which half of a head is rotated.
"""
from __future__ import annotations

import math
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..layer_config import Names
from ..mixers.config import Mamba2Config
from ..rope import rope_config, rope_parameters
from .family import Family, require_absent, require_silu

BAMBA_NAMES = Names(feed_forward_norm="pre_ff_layernorm", last_norm="model.final_layernorm",
                    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")
SIZES = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256,
         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False}


def mamba_config(f: Fields, name: str = "mamba", **more: Any) -> Mamba2Config:
    """The state spaces of a file whose keys begin with mamba_. Raises `ModelError`."""
    require_silu(f)
    heads, groups = f.positive("mamba_n_heads"), f.positive("mamba_n_groups")
    if f.get("mamba_d_ssm") is not None: inner = f.positive("mamba_d_ssm")
    else: inner = int(f.number("mamba_expand") * f.positive("hidden_size"))
    head = inner // heads if f.get("mamba_d_head") == "auto" else f.positive("mamba_d_head")
    if heads * head != inner:
        raise ModelError(f"{f.name}: mamba_n_heads {heads} × mamba_d_head {head}",
                         f"mamba_expand × hidden_size = {inner}")
    if heads % groups: raise ModelError(f"{f.name}: mamba_n_heads {heads} with mamba_n_groups {groups}",
                                        "a multiple of these")
    if (taps := f.positive("mamba_d_conv")) < 2:
        raise ModelError(f"{f.name}: a convolution of {taps} taps", "at least 2")
    return Mamba2Config(heads, head, groups, f.positive("mamba_d_state"), taps,
                        f.flag("mamba_proj_bias"), f.flag("mamba_conv_bias"), time_limits(f),
                        name=name, **more)


def time_limits(f: Fields) -> tuple[float, float] | None:
    """time_step_limit, None where it limits nothing. Raises `ModelError`."""
    given = f.get("time_step_limit")
    if given is None: return None
    if isinstance(given, list | tuple):     # transformers writes infinity so, as JSON has none
        given = [math.inf if each == {"__float__": "Infinity"} else each for each in given]
    numbers = isinstance(given, list | tuple) and len(given) == 2 and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in given)
    if not numbers or not 0 <= given[0] < given[1]:
        raise ModelError(f"{f.name}: time_step_limit is {brief(given)}", "two numbers, the smaller first")
    low, high = map(float, given)
    return None if low == 0 and math.isinf(high) else (low, high)


def bamba(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Bamba."""
    require_absent(f, "layer_types")
    own, layers = mamba_config(f), f.positive("num_hidden_layers")
    full = frozenset[int]() if f.get("attn_layer_indices") is None else f.layers("attn_layer_indices")
    rope = rope_config(f.within({"partial_rotary_factor": 0.5}), rope_parameters(f), f.positive("head_dim"),
                       partial=True)
    return {"mixers": tuple(None if i in full else own for i in range(layers)), "ropes": (rope,) * layers,
            "names": BAMBA_NAMES, "mlp_bias": f.flag("mlp_bias")}


BAMBA = Family("BambaForCausalLM", {**SIZES, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
               settings=bamba)


MAMBA2_NAMES = Names(attention_norm="norm", last_norm="model.norm_f")
# of models without attention: nothing is read of these but the number of positions, which is not limited
NO_ATTENTION = {"num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1,
                "max_position_embeddings": 1 << 17}


def mamba2(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Mamba-2."""
    require_absent(f, "layer_types")
    layers = f.positive("num_hidden_layers")
    f = f.within({"mamba_n_heads": f.get("num_heads"), "mamba_d_head": f.get("head_dim"),
                  "mamba_n_groups": f.get("n_groups"), "mamba_d_state": f.get("state_size"),
                  "mamba_d_conv": f.get("conv_kernel"), "mamba_expand": f.get("expand"),
                  "mamba_proj_bias": f.get("use_bias"), "mamba_conv_bias": f.get("use_conv_bias")})
    return {"mixers": (mamba_config(f, "mixer"),) * layers, "halves": ("mixer",) * layers,
            "ropes": (None,) * layers, "names": MAMBA2_NAMES, "norm_eps": f.number("layer_norm_epsilon"),
            "float32_residuals": f.flag("residual_in_fp32")}


MAMBA2 = Family("Mamba2ForCausalLM",
                {**NO_ATTENTION, "num_heads": 128, "head_dim": 64, "vocab_size": 32_768, "hidden_size": 4096,
                 "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5, "expand": 2,
                 "conv_kernel": 4, "n_groups": 8, "use_bias": False, "use_conv_bias": True,
                 "residual_in_fp32": True}, settings=mamba2)
