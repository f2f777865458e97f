"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: layers of one half each, which is Mamba-2, attention without
positions, a feed-forward with relu² and no gate, or a mixture of such experts, which may share projections to
a latent.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields, activation
from ..layer_config import COUNTS, MoEConfig, Names, moe_config
from .deepseek import EXPERTS, with_groups
from .family import FULL, Family
from .mamba2 import mamba_config
from .qwen3_next import LINEAR

MOE, MLP = "moe", "mlp"
# letters of hybrid_override_pattern, and older names of kinds
KINDS = {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP, "mamba": LINEAR, "attention": FULL, LINEAR: LINEAR,
         FULL: FULL, MOE: MOE, MLP: MLP}
ATTENTION = [f"mixer.{name}_proj" for name in "qkvo"]
NAMES = Names(attention_norm="norm", feed_forward_norm="norm", last_norm="model.norm_f",
              qkv=(ATTENTION[0], ATTENTION[1], ATTENTION[2]), output=ATTENTION[3], gate_up=("mixer.up_proj",),
              down="mixer.down_proj", router="mixer.gate", choice_bias="mixer.gate.e_score_correction_bias",
              expert="mixer.experts.{}", expert_matrices=("up_proj", "down_proj"),
              shared_expert="mixer.shared_experts", unread=("mtp.",),
              latents=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"))


def complete(f: Fields) -> Fields:
    """The layers' kinds and their number: of layer_types, layers_block_type or hybrid_override_pattern.
    Raises `ModelError`."""
    keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    key = next((each for each in keys if f.get(each) is not None), keys[0])
    given = f.get(key)
    kinds = list(given) if isinstance(given, str | list) else []
    if not kinds or not all(isinstance(each, str) and each in KINDS for each in kinds):
        raise ModelError(f"{f.name}: {key} is {brief(given)}",
                         f"kinds of layers: {LINEAR}, {FULL}, {MLP}, {MOE}, or a pattern of M, *, - and E")
    older = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "expand": "mamba_expand",
             "time_step_min": "mamba_dt_min", "use_conv_bias": "mamba_conv_bias"}
    found = {name: f.get(other) for name, other in older.items() if f.get(other) is not None}
    return f.within({**found, "num_hidden_layers": len(kinds), "layer_types": [KINDS[each] for each in kinds],
                     "hidden_act": "silu"})


def read_activation(f: Fields) -> str:
    """The activation of feed-forwards, of which models without gates have one more. Raises `ModelError`."""
    return "relu2" if f.get("mlp_hidden_act") == "relu2" else activation(f, "mlp_hidden_act")


def mixture(f: Fields, layers: list[bool]) -> MoEConfig:
    """The mixture of experts of a file. Raises `ModelError`."""
    shared = f.positive("moe_shared_expert_intermediate_size")
    made = moe_config(f, 8, "moe_intermediate_size", layers, shared,
                      renormalize=f.flag("norm_topk_prob"), keys=(EXPERTS, "num_local_experts"),
                      score="sigmoid", choice_bias=True, exact_router=True, gated=False)
    policy = with_groups(f, replace(made.policy, scale=f.number("routed_scaling_factor")))
    latent = 0 if f.get("moe_latent_size") is None else f.positive("moe_latent_size")
    return replace(made, policy=policy, latent=latent)


def nemotron_h(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    kinds, layers = f.each_layer("layer_types"), f.positive("num_hidden_layers")
    inner = f.positive("mamba_num_heads") * f.positive("mamba_head_dim")
    # transformers and the models' own code limit steps from below, whatever time_step_limit is
    own = mamba_config(f.within({
        "hidden_act": f.get("mamba_hidden_act", "silu"), "mamba_n_heads": f.get("mamba_num_heads"),
        "mamba_d_head": f.get("mamba_head_dim"), "mamba_d_ssm": inner, "mamba_n_groups": f.get("n_groups"),
        "mamba_d_state": f.get("ssm_state_size"), "mamba_d_conv": f.get("conv_kernel"),
        "mamba_conv_bias": f.get("use_conv_bias"), "mamba_proj_bias": f.get("use_bias"),
        "time_step_limit": [f.number("time_step_min", zero=True), math.inf]}), "mixer")
    experts = [kind == MOE for kind in kinds]
    return {"mixers": tuple(own if kind == LINEAR else None for kind in kinds), "names": NAMES,
            "halves": tuple("mixer" if kind in (LINEAR, FULL) else "feed_forward" for kind in kinds),
            "ropes": (None,) * layers, "norm_eps": f.number("layer_norm_epsilon"), "mlp_gated": False,
            "activation": read_activation(f), "mlp_bias": f.flag("mlp_bias"),
            "norm_rounds_last": True, "qkv_bias": False, "output_bias": False,
            "moe": mixture(f, experts) if any(experts) else None}


FAMILY = Family("NemotronHForCausalLM",
                {"num_key_value_heads": 8, "head_dim": 128, "mlp_hidden_act": "relu2", "ssm_state_size": 128,
                 "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "expand": 2,
                 "use_conv_bias": True, "n_routed_experts": 8, "moe_intermediate_size": 7688,
                 "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2,
                 "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                 "layer_norm_epsilon": 1e-5, "time_step_min": 0.001},
                frozenset({EXPERTS, *COUNTS}), nemotron_h, complete=complete)
