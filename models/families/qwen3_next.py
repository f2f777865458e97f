"""Qwen3-Next and the text of Qwen3.5: three layers of the gated delta rule, then one of attention with a gate
for each element of its output. Norms multiply by 1 + w, a quarter of a head is rotated. All layers have a
mixture of experts with a shared one, but for dense Qwen3.5.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..layer_config import COUNTS, Names, moe_config
from ..mixers.config import GatedDeltaConfig
from ..rope import rope_config, rope_parameters
from .family import FULL, Family, require_silu
from .qwen import mixtures

LINEAR = "linear_attention"
NAMES = Names(unread=("mtp.",), fused="rows")
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "linear_num_key_heads": 16, "linear_num_value_heads": 32}


def list_kinds(f: Fields) -> list[str]:
    """Each layer's kind: layer_types, or attention in every full_attention_interval-th. Raises
    `ModelError`."""
    if f.get("layer_types") is None:
        every = f.positive("full_attention_interval")
        return [LINEAR if (i + 1) % every else FULL for i in range(f.positive("num_hidden_layers"))]
    kinds: list[str] = f.each_layer("layer_types")
    if unknown := [kind for kind in kinds if kind not in (FULL, LINEAR)]:
        raise ModelError(f"{f.name}: layer_types has {brief(unknown[0])}, which is not supported",
                         f"{FULL} or {LINEAR}")
    return kinds


def delta_config(f: Fields, fused: bool) -> GatedDeltaConfig:
    """The gated delta rule of a file. Raises `ModelError`."""
    require_silu(f)
    heads, shared = f.positive("linear_num_value_heads"), f.positive("linear_num_key_heads")
    if heads % shared:
        raise ModelError(f"{f.name}: linear_num_value_heads {heads} is not a multiple of "
                         f"linear_num_key_heads {shared}",
                         "each key head shared by the same number of value heads")
    if (taps := f.positive("linear_conv_kernel_dim")) < 2:
        raise ModelError(f"{f.name}: linear_conv_kernel_dim is {taps}", "at least 2")
    return GatedDeltaConfig(heads, shared, f.positive("linear_key_head_dim"),
                            f.positive("linear_value_head_dim"), taps, fused)


def hybrid(f: Fields, fused: bool) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` of layers with the delta rule and gated attention."""
    own, layers = delta_config(f, fused), f.positive("num_hidden_layers")
    rope = rope_config(f, rope_parameters(f), f.positive("head_dim"), partial=True)
    return {"mixers": tuple(own if kind == LINEAR else None for kind in list_kinds(f)),
            "ropes": (rope,) * layers, "gated_attention": True, "qk_norm": "head", "norm_offset": 1.0,
            "norm_rounds_last": True, "names": NAMES}


def qwen3_next(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Qwen3-Next."""
    moe = moe_config(f, 512, "moe_intermediate_size", mixtures(f),
                     f.positive("shared_expert_intermediate_size"), True, f.flag("norm_topk_prob"))
    return {**hybrid(f, True), "moe": moe}


def qwen3_5(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for dense Qwen3.5."""
    return hybrid(without_sections(f), False)


def qwen3_5_moe(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Qwen3.5 with experts."""
    layers = (True,) * f.positive("num_hidden_layers")
    moe = moe_config(f, 256, "moe_intermediate_size", layers, f.positive("shared_expert_intermediate_size"),
                     True)
    return {**qwen3_5(f), "moe": moe}


def without_sections(f: Fields) -> Fields:
    """A file whose rope has sections of a head for three positions: of text they are equal."""
    given = f.get("rope_parameters")
    if not isinstance(given, dict): return f
    return f.within({"rope_parameters": {name: value for name, value in given.items()
                                         if name not in ("mrope_section", "mrope_interleaved")}})


ATTENTION = {**DELTA, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
QWEN3_5 = Family("Qwen3_5ForCausalLM", {**ATTENTION, "num_key_value_heads": 4}, settings=qwen3_5)
QWEN3_5_MOE = Family("Qwen3_5MoeForCausalLM",
                     {**ATTENTION, "num_key_value_heads": 2, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                      "intermediate_size": 512}, frozenset(COUNTS), qwen3_5_moe)
FAMILY = Family("Qwen3NextForCausalLM",
                {**ATTENTION, "num_key_value_heads": 2, "num_experts_per_tok": 10,
                 "decoder_sparse_step": 1, "moe_intermediate_size": 512,
                 "shared_expert_intermediate_size": 512, "norm_topk_prob": True}, frozenset(COUNTS),
                qwen3_next)
