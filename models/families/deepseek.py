"""DeepSeek-V2 and DeepSeek-V3, and what is published as the latter (R1, Kimi K2): multi-head latent
attention, and from first_k_dense_replace on mixtures of experts with shared ones.

V2 chooses experts by softmax, of all experts or of the best groups ("greedy", "group_limited_greedy"); V3 by
sigmoid with a bias of choices, of the best groups ("noaux_tc").
"""
from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from tinygrad_nv.errors import ModelError, SpecError, brief
from tinygrad_nv.tile.router.spec import Policy, check

from ..fields import Fields
from ..layer_config import LatentConfig, MoEConfig, Names, moe_config
from ..rope import RopeConfig, rope_config, rope_parameters
from .family import Family

NAMES = Names(shared_expert="mlp.shared_experts")
EXPERTS = "n_routed_experts"


def latent_config(f: Fields, interleaved: bool) -> LatentConfig:
    """Sizes of attention. Raises `ModelError`."""
    q_rank = 0 if f.get("q_lora_rank") is None else f.positive("q_lora_rank")
    return LatentConfig(q_rank, f.positive("kv_lora_rank"), f.positive("qk_nope_head_dim"),
                        f.positive("qk_rope_head_dim"), f.positive("v_head_dim"), interleaved,
                        f.flag("attention_bias"))


def attention_scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """1/√D; a scaled rope with mscale_all_dim multiplies it by the square of YaRN's temperature."""
    scale = latent.head ** -0.5
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1: return scale
    return float(scale * (0.1 * rope.mscale_all_dim * log(rope.factor) + 1.0) ** 2)


def mixture(f: Fields, default: int, alias: str, policy: Policy) -> MoEConfig | None:
    """Mixtures of experts after the first layers, if there are more; `policy` with any k. Raises
    `ModelError`."""
    first, layers = f.count("first_k_dense_replace", 0), f.positive("num_hidden_layers")
    if first >= layers: return None
    shared = f.positive("moe_intermediate_size") * f.positive("n_shared_experts")
    made = moe_config(f, default, "moe_intermediate_size", [i >= first for i in range(layers)], shared,
                      keys=(EXPERTS, alias))
    policy = replace(policy, k=made.policy.k, scale=f.number("routed_scaling_factor"))
    try: check(policy, made.experts)
    except SpecError as error:
        groups, top = (brief(f.get(key)) for key in ("n_group", "topk_group"))
        raise ModelError(f"{f.name}: n_group is {groups}, topk_group {top}: {error.found}", error.expected,
                         "correct the file") from error
    return replace(made, policy=policy, exact_router=True)


def with_groups(f: Fields, policy: Policy) -> Policy:
    """A policy that chooses experts of n_group groups. Raises `ModelError`."""
    groups, top = f.positive("n_group"), f.positive("topk_group")
    try: return replace(policy, groups=groups, top_groups=top)
    except SpecError as error:
        raise ModelError(f"{f.name}: n_group is {groups}, topk_group {top}", error.expected,
                         "correct the file") from error


def common(f: Fields, interleaved: bool) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`, without the mixture."""
    latent, layers, heads = (latent_config(f, interleaved), f.positive("num_hidden_layers"),
                             f.positive("num_attention_heads"))
    if f.get("num_key_value_heads") not in (None, heads):
        raise ModelError(f"{f.name}: num_key_value_heads is {brief(f.get('num_key_value_heads'))}",
                         f"as many as query heads, {heads}: each has keys of its own", "correct the file")
    rope = rope_config(f, rope_parameters(f), latent.rope)
    drafts = [f.positive(key) for key in ("num_nextn_predict_layers", "num_mtp_layers") if f.get(key)]
    return {"latent": latent, "head_dim": latent.head, "num_kv_heads": heads,
            "attention_scale": attention_scale(latent, rope), "ropes": (rope,) * layers, "names": NAMES,
            "qkv_bias": False, "draft_layers": drafts[0] if drafts else 0}


def require(f: Fields, key: str, *known: str) -> str:
    """Returns the value of a key, the first of `known` where it is missing. Raises `ModelError` for
    another."""
    if (value := f.get(key, known[0])) not in known:
        raise ModelError(f"{f.name}: {key} is {brief(value)}, which is not implemented",
                         f"one of: {', '.join(known)}", "use a model as it was published")
    return str(value)


def second(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for V2. norm_topk_prob is ignored, as transformers ignores it."""
    require(f, "scoring_func", "softmax")
    policy = Policy(1, group_score="max")
    if require(f, "topk_method", "greedy", "group_limited_greedy") != "greedy": policy = with_groups(f,
                                                                                                     policy)
    return {**common(f, True), "mlp_bias": f.flag("mlp_bias"),
            "moe": mixture(f, 64, "num_experts", policy)}


def third(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for V3."""
    require(f, "scoring_func", "sigmoid")
    require(f, "topk_method", "noaux_tc")
    policy = with_groups(f, Policy(1, "sigmoid", f.flag("norm_topk_prob")))
    moe = mixture(f, 256, "num_local_experts", policy)
    return {**common(f, f.flag("rope_interleave")),
            "moe": None if moe is None else replace(moe, choice_bias=True)}


HONOURS = frozenset({EXPERTS, "num_experts", "num_local_experts"})
SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128}
V2 = Family("DeepseekV2ForCausalLM",
            {**SIZES, "first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
             "moe_intermediate_size": 1407},
            HONOURS, second, "qk_rope_head_dim")
V3 = Family("DeepseekV3ForCausalLM",
            {**SIZES, "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
             "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
             "norm_topk_prob": True, "rope_interleave": True},
            HONOURS, third, "qk_rope_head_dim")
