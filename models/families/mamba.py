"""Models with Mamba's selective scans. Mamba and Falcon Mamba: these alone, a layer each; Falcon Mamba
normalises what scans are given. Jamba: these, so normalised, with attention without positions in some layers,
and in all a feed-forward or a mixture of experts.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError

from ..fields import Fields
from ..layer_config import COUNTS, Names, moe_config
from ..mixers.config import MambaConfig
from .family import Family, require_absent, require_silu
from .mamba2 import MAMBA2_NAMES, NO_ATTENTION

JAMBA_NAMES = Names(feed_forward_norm="pre_ff_layernorm", last_norm="model.final_layernorm",
                    router="feed_forward.router", expert="feed_forward.experts.{}", fused="rows",
                    fused_tensors=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
                    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")


def mamba_config(f: Fields, channels: int = 0, **more: Any) -> MambaConfig:
    """The selective scans of a file whose keys begin with mamba_, of so many `channels`, or mamba_expand ×
    hidden_size. Raises `ModelError`."""
    require_silu(f)
    require_absent(f, "layer_types")
    hidden, rank = f.positive("hidden_size"), f.get("mamba_dt_rank")
    if (channels := channels or int(f.number("mamba_expand") * hidden)) < 1:
        raise ModelError(f"{f.name}: expand × hidden_size is {channels}", "at least 1")
    if (taps := f.positive("mamba_d_conv")) < 2:
        raise ModelError(f"{f.name}: a convolution of {taps} taps", "at least 2")
    return MambaConfig(channels, f.positive("mamba_d_state"),
                       -(-hidden // 16) if rank == "auto" else f.positive("mamba_dt_rank"), taps,
                       f.flag("mamba_proj_bias"), f.flag("mamba_conv_bias"), **more)


def mamba(f: Fields, **more: Any) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Mamba."""
    layers, width = f.positive("num_hidden_layers"), f.positive("intermediate_size")
    f = f.within({"mamba_d_state": f.get("state_size"), "mamba_d_conv": f.get("conv_kernel"),
                  "mamba_expand": f.get("expand"), "mamba_dt_rank": f.get("time_step_rank"),
                  "mamba_proj_bias": f.get("use_bias"), "mamba_conv_bias": f.get("use_conv_bias")})
    own = mamba_config(f, 0 if width == NO_ATTENTION["intermediate_size"] else width, **more)
    return {"mixers": (own,) * layers, "halves": ("mixer",) * layers,
            "ropes": (None,) * layers, "names": MAMBA2_NAMES, "norm_eps": f.number("layer_norm_epsilon"),
            "float32_residuals": f.flag("residual_in_fp32")}


def falcon_mamba(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Falcon Mamba."""
    return mamba(f, norm_eps=f.number("mixer_rms_eps"), weightless=True)


def jamba(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Jamba."""
    own = mamba_config(f, norm_eps=f.number("rms_norm_eps"), name="mamba")
    attends, mixes = list_layers(f, "attn_layer"), list_layers(f, "expert_layer")
    made = {"mixers": tuple(None if each else own for each in attends), "ropes": (None,) * len(attends),
            "names": JAMBA_NAMES, "qkv_bias": False, "output_bias": False}
    if not any(mixes) or {f.get(key) for key in COUNTS} - {None} == {1}: return made
    return {**made, "moe": moe_config(f, 16, "intermediate_size", mixes, renormalize=False)}


def list_layers(f: Fields, key: str) -> tuple[bool, ...]:
    """Says of each layer whether it is one of those that a period and an offset choose. Raises
    `ModelError`."""
    period, offset = f.positive(f"{key}_period"), f.count(f"{key}_offset", 0)
    if offset >= period:
        raise ModelError(f"{f.name}: {key}_offset is {offset}", f"less than {key}_period, {period}")
    return tuple(i % period == offset for i in range(f.positive("num_hidden_layers")))


SIZES = {**NO_ATTENTION, "vocab_size": 50_280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32,
         "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
         "hidden_act": "silu", "residual_in_fp32": True, "time_step_rank": "auto",
         "tie_word_embeddings": True}
MAMBA = Family("MambaForCausalLM", SIZES, settings=mamba)
FALCON_MAMBA = Family("FalconMambaForCausalLM", {**SIZES, "mixer_rms_eps": 1e-6}, settings=falcon_mamba)
JAMBA = Family("JambaForCausalLM",
               {"vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 1 << 18,
                "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
                "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
                "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True,
                "mamba_proj_bias": False},
               frozenset(COUNTS), jamba)
