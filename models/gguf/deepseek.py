"""DeepSeek-V2 and V3, by what gates their experts: softmax, or sigmoid. Sizes of latent attention are
metadata; that of a key is its own only in files whose kv_b is in two tensors, else it is that of a query.

llama.cpp chooses groups of experts as V3 does also for V2; here they are chosen as V2 was trained. Files of
V3 from before llama.cpp knew groups do not say them: its 256 experts are in 8, of which 4 are taken.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError

from ..families.deepseek import NAMES
from .architecture import USE, Architecture, Metadata, rope_scaling

SOFTMAX, SIGMOID = 1, 2     # ggml's numbers of gating functions
GATING, NORMALISED, SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
RANK, Q_RANK, ROTATED = "attention.kv_lora_rank", "attention.q_lora_rank", "rope.dimension_count"
KEY, VALUE = "attention.key_length", "attention.value_length"
GROUPS, TOP_GROUPS = "expert_group_count", "expert_group_used_count"
KEYS = {"expert_count": "n_routed_experts", "leading_dense_block_count": "first_k_dense_replace",
        "expert_shared_count": "n_shared_experts", RANK: "kv_lora_rank", ROTATED: "qk_rope_head_dim",
        SCALE: "routed_scaling_factor", NORMALISED: "norm_topk_prob"}
# of DeepSeek-V3's config.json: experts, groups, groups that are taken
V3_EXPERTS, V3_GROUPS, V3_TOP_GROUPS = 256, 8, 4
DRAFT = "nextn_predict_layers"      # of block_count


def sizes(m: Metadata) -> dict[str, Any]:
    """Returns the sizes of attention."""
    own = f"{KEY}_mla" in m.own
    head, value = (m.positive(f"{key}_mla" if own else key) for key in (KEY, VALUE))
    return {"qk_nope_head_dim": head - m.positive(ROTATED), "v_head_dim": value,
            "kv_lora_rank": m.positive(RANK),
            "q_lora_rank": m.get(Q_RANK) or None,
            "num_key_value_heads": m.get("attention.head_count")}


def second(m: Metadata) -> dict[str, Any]:
    """Returns the settings that V2 has of its own."""
    if m.get(NORMALISED):
        raise ModelError(f"{m.file.path}: {m.kind}.{NORMALISED} is True, and {m.kind}.{GATING} "
                         "is 1 (softmax)", "weights as softmax gives them", USE)
    grouped = m.get(GROUPS, 1) not in (0, 1)
    return {"architectures": ["DeepseekV2ForCausalLM"],
            "topk_method": "group_limited_greedy" if grouped else "greedy"}


def third(m: Metadata) -> dict[str, Any]:
    """Returns the settings that V3 has of its own."""
    made = {"architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": bool(m.get(NORMALISED, False))}
    if m.get(GROUPS) is None and m.get("expert_count") == V3_EXPERTS:
        made |= {"n_group": V3_GROUPS, "topk_group": V3_TOP_GROUPS}
    return made


def settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json."""
    gating = m.get(GATING) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID): raise m.refusal(GATING, "1 (softmax) or 2 (sigmoid)")
    if m.get(DRAFT): raise m.refusal(DRAFT, "0: llama.cpp's converter leaves these layers out")
    scaling = rope_scaling(m, {"yarn_log_multiplier": "mscale_all_dim"})
    if scaling is not None and "mscale_all_dim" in scaling:
        # the file has a tenth of it; both are the same in published models
        scaling["mscale_all_dim"] = scaling["mscale"] = scaling["mscale_all_dim"] * 10
    return {**sizes(m), "rope_scaling": scaling, "n_group": m.get(GROUPS) or 1,
            "topk_group": m.get(TOP_GROUPS) or 1, "routed_scaling_factor": m.get(SCALE) or 1.0,
            "first_k_dense_replace": m.get("leading_dense_block_count", 0),
            "moe_intermediate_size": m.positive("expert_feed_forward_length"),
            **(second(m) if gating == SOFTMAX else third(m))}


ARCHITECTURE = Architecture(
    "DeepseekV2ForCausalLM", NAMES, KEYS,
    frozenset({GATING, Q_RANK, f"{KEY}_mla", f"{VALUE}_mla", GROUPS, TOP_GROUPS}), settings=settings,
    whole_heads=False)
