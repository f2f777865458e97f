"""Kimi Linear (arXiv 2510.26692) and Ling 3: the delta rule with decays of channels in most layers, latent
attention in the others, and after the first layers mixtures of experts as DeepSeek-V3 has them. Kimi's
attention has no positions; Ling's has rope, and a gate for each head.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.tile.router.spec import Policy

from ..fields import Fields
from ..layer_config import MoEConfig, Names
from ..mixers.config import ChannelDeltaConfig
from .deepseek import HONOURS, SIZES, common, mixture, require, with_groups
from .family import FULL, Family, require_silu
from .qwen3_next import LINEAR

# keys of published files, and of transformers
KEYS = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group", "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
        "num_nextn_predict_layers": "num_mtp_layers"}
# those of modules likewise: the first are of Kimi Linear, the last of Ling
SPELLINGS = ((".block_sparse_moe.", ".mlp."), (".forget_gate.", "."), (".attention.", ".self_attn."),
             (".self_attn.dense.", ".self_attn.o_proj."),
             (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"))
NAMES = Names(shared_expert="mlp.shared_experts", spellings=SPELLINGS)
KIMI_NAMES = replace(NAMES, expert_matrices=("w1", "w3", "w2"),
                     shared_matrices=("gate_proj", "up_proj", "down_proj"))


def complete(f: Fields) -> Fields:
    """Adds what a file says by other keys: Kimi's in a section of the layers that have the delta rule, Ling's
    by those of attention."""
    made = {own: f.get(theirs) for theirs, own in KEYS.items() if f.get(theirs) is not None}
    section = f.section("linear_attn_config")
    for theirs, own in (("head_dim", "linear_head_dim"), ("num_heads", "linear_num_heads"),
                        ("short_conv_kernel_size", "linear_conv_kernel_dim")):
        if theirs in section: made[own] = section[theirs]
    if f.get("layer_types") is None and "full_attn_layers" in section and "kda_layers" in section:
        full, delta = (Fields(section, f.name).layers(key) for key in ("full_attn_layers", "kda_layers"))
        layers = range(1, f.positive("num_hidden_layers") + 1)
        if full & delta or full | delta != set(layers):
            raise ModelError(f"{f.name}: full_attn_layers and kda_layers of linear_attn_config are "
                             f"{brief(sorted(full))} and {brief(sorted(delta))}",
                             "each layer in one of them, counted from 1",
                             "correct the file, or download it again")
        made["layer_types"] = [FULL if i in full else LINEAR for i in layers]
    for theirs, own in (("head_dim", "linear_head_dim"), ("num_attention_heads", "linear_num_heads"),
                        ("short_conv_kernel_size", "linear_conv_kernel_dim")):
        if f.get(own) is None and own not in made: made[own] = f.get(theirs)
    return f.within(made)


def each_kind(f: Fields, key: str, default: list[str], known: tuple[str, str]) -> list[str]:
    """The kind of each layer. Raises `ModelError`."""
    kinds: list[str] = default if f.get(key) is None else f.each_layer(key)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(f"{f.name}: {key} has {brief(unknown[0])}, which is not supported",
                         " or ".join(known))
    return kinds


def experts(f: Fields) -> MoEConfig | None:
    """Mixtures of experts in the layers that mlp_layer_types says. Raises `ModelError`."""
    first, layers = f.count("first_k_dense_replace", 1), f.positive("num_hidden_layers")
    default = ["dense" if i < first else "sparse" for i in range(layers)]
    chosen = tuple(kind == "sparse" for kind in each_kind(f, "mlp_layer_types", default, ("dense", "sparse")))
    if not any(chosen): return None
    policy = with_groups(f, Policy(1, "sigmoid", f.flag("norm_topk_prob")))
    made = mixture(f.within({"first_k_dense_replace": 0}), 1, "num_local_experts", policy)
    assert made is not None
    return replace(made, layers=chosen, choice_bias=True)


def delta(f: Fields, narrow: bool) -> ChannelDeltaConfig:
    """Sizes of the delta rule. Raises `ModelError`."""
    require_silu(f)
    heads, taps = f.positive("linear_num_heads"), f.positive("linear_conv_kernel_dim")
    if taps < 2:
        raise ModelError(f"{f.name}: linear_conv_kernel_dim (short_conv_kernel_size) is {taps}", "at least 2")
    least = None
    if not narrow and f.flag("kda_safe_gate"):
        least = f.get("kda_lower_bound")
        if isinstance(least, bool) or not isinstance(least, int | float) or not -1e9 < least < 0:
            raise ModelError(f"{f.name}: kda_lower_bound is {brief(least)}", "a number below 0",
                             "correct the file, or download it again")
        least = float(least)
    return ChannelDeltaConfig(heads, f.positive("linear_head_dim"), taps, narrow, least,
                              (1, 1, heads, 1) if narrow else (heads,))


def layers_of(f: Fields, own: ChannelDeltaConfig, default: list[str]) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that say which layer has what."""
    kinds = each_kind(f, "layer_types", default, (FULL, LINEAR))
    return {"moe": experts(f), "mixers": tuple(own if kind == LINEAR else None for kind in kinds)}


def kimi(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Kimi Linear."""
    require(f, "moe_router_activation_func", "sigmoid")
    for key, known in (("mla_use_nope", True), ("moe_layer_freq", 1)):
        if f.get(key, known) != known:
            raise ModelError(f"{f.name}: {key} is {brief(f.get(key))}, which is not implemented",
                             f"{known}", "use a model as it was published")
    layers = f.positive("num_hidden_layers")
    default = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    # no layer has rope
    made = common(f.within({"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0}), True)
    return {**made, **layers_of(f, delta(f, True), default), "names": KIMI_NAMES, "ropes": (None,) * layers}


def ling(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Ling 3."""
    layers, every = f.positive("num_hidden_layers"), f.positive("layer_group_size")
    default = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    made = common(f, True)
    return {**made, **layers_of(f, delta(f, False), default), "names": NAMES,
            "latent": replace(made["latent"], gated=True)}


BOTH: dict[str, Any] = {**SIZES, "q_lora_rank": None, "num_attention_heads": 32, "num_experts_per_tok": 8,
                        "n_shared_experts": 1, "norm_topk_prob": True}
KIMI = Family("KimiLinearForCausalLM",
              {**BOTH, "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216,
               "num_hidden_layers": 27, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5,
               "moe_intermediate_size": 1024, "num_local_experts": 256, "n_group": 1, "topk_group": 1,
               "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32,
               "linear_conv_kernel_dim": 4}, HONOURS, kimi, "qk_rope_head_dim", complete)
LING = Family("BailingHybridForCausalLM",
              {**BOTH, "vocab_size": 157_184, "hidden_size": 2560, "intermediate_size": 6144,
               "num_hidden_layers": 42, "max_position_embeddings": 262_144, "moe_intermediate_size": 768,
               "num_local_experts": 512, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
               "first_k_dense_replace": 2, "num_mtp_layers": 1, "rope_theta": 6_000_000.0, "head_dim": 128,
               "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_safe_gate": True,
               "kda_lower_bound": -5.0}, HONOURS, ling, "qk_rope_head_dim", complete)
