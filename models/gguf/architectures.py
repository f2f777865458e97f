"""The architectures of llama.cpp that are read, by general.architecture."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.gguf.file import GGUFFile

from ..families.deepseek import NAMES as DEEPSEEK_NAMES
from ..families.family import FULL, SLIDING
from ..families.gemma import BOTH
from ..families.gpt_oss import NAMES as GPT_OSS_NAMES
from ..families.llama4 import CHUNKED
from ..families.llama4 import NAMES as LLAMA4_NAMES
from ..families.mistral import NAMES as MIXTRAL_NAMES
from ..families.olmo import NAMES as OLMO_NAMES
from ..families.phi3 import NAMES as PHI3_NAMES
from .architecture import PATTERN, USE, Architecture, Metadata, rope_scaling

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
WINDOW, LOCAL_BASE = "attention.sliding_window", "rope.freq_base_swa"
LARGEST = {"gemma2": 46, "gemma3": 62}      # layers
LOCAL = 10_000.0        # base of Gemma 3's layers with a window, where the file says none
UNROTATED = "rope.scaling.finetuned"        # false: no layer has rope
CHUNK = 8192            # of Llama 4
UNNORMALISED = 128      # experts
TRAINED = "rope.scaling.original_context_length"


def deepseek_sizes(m: Metadata) -> dict[str, Any]:
    """Returns the sizes of latent attention. That of a key is its own only in files whose kv_b is in two
    tensors, else it is that of a query."""
    own = f"{KEY}_mla" in m.own
    head, value = (m.positive(f"{key}_mla" if own else key) for key in (KEY, VALUE))
    return {"qk_nope_head_dim": head - m.positive(ROTATED), "v_head_dim": value,
            "kv_lora_rank": m.positive(RANK),
            "q_lora_rank": m.get(Q_RANK) or None,
            "num_key_value_heads": m.get("attention.head_count")}


def deepseek2(m: Metadata) -> dict[str, Any]:
    """Returns the settings that V2 has of its own."""
    if m.get(NORMALISED):
        raise ModelError(f"{m.file.path}: {m.kind}.{NORMALISED} is True, and {m.kind}.{GATING} "
                         "is 1 (softmax)", "weights as softmax gives them", USE)
    grouped = m.get(GROUPS, 1) not in (0, 1)
    return {"architectures": ["DeepseekV2ForCausalLM"],
            "topk_method": "group_limited_greedy" if grouped else "greedy"}


def deepseek3(m: Metadata) -> dict[str, Any]:
    """Returns the settings that V3 has of its own. Files from before llama.cpp knew groups do not say them:
    its 256 experts are in 8, of which 4 are taken."""
    made = {"architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": bool(m.get(NORMALISED, False))}
    if m.get(GROUPS) is None and m.get("expert_count") == V3_EXPERTS:
        made |= {"n_group": V3_GROUPS, "topk_group": V3_TOP_GROUPS}
    return made


def deepseek_settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of DeepSeek-V2 and V3, by what gates their experts: softmax, or sigmoid. llama.cpp
    chooses groups of experts as V3 does also for V2; here they are chosen as V2 was trained."""
    gating = m.get(GATING) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID): raise m.refusal(GATING, "1 (softmax) or 2 (sigmoid)")
    if m.get(DRAFT): raise m.refusal(DRAFT, "0: llama.cpp's converter leaves these layers out")
    scaling = rope_scaling(m, {"yarn_log_multiplier": "mscale_all_dim"})
    if scaling is not None and "mscale_all_dim" in scaling:
        # the file has a tenth of it; both are the same in published models
        scaling["mscale_all_dim"] = scaling["mscale"] = scaling["mscale_all_dim"] * 10
    return {**deepseek_sizes(m), "rope_scaling": scaling, "n_group": m.get(GROUPS) or 1,
            "topk_group": m.get(TOP_GROUPS) or 1, "routed_scaling_factor": m.get(SCALE) or 1.0,
            "first_k_dense_replace": m.get("leading_dense_block_count", 0),
            "moe_intermediate_size": m.positive("expert_feed_forward_length"),
            **(deepseek2(m) if gating == SOFTMAX else deepseek3(m))}


DEEPSEEK = Architecture(
    "DeepseekV2ForCausalLM", DEEPSEEK_NAMES, KEYS,
    frozenset({GATING, Q_RANK, f"{KEY}_mla", f"{VALUE}_mla", GROUPS, TOP_GROUPS}), settings=deepseek_settings,
    whole_heads=False)


def mistral(m: Metadata) -> dict[str, Any]:
    """Returns the settings of a llama with a window."""
    return {"architectures": ["MistralForCausalLM"], **window(m)} if m.own.get(WINDOW) else {}


def window(m: Metadata) -> dict[str, Any]:
    """Returns the settings of a window in every layer."""
    return {"sliding_window": m.own[WINDOW]} if m.own.get(WINDOW) else {}


def qwen(m: Metadata) -> dict[str, Any]:
    """Returns Qwen's settings of a window in every layer."""
    if not m.own.get(WINDOW): return {}
    return {"use_sliding_window": True, "max_window_layers": 0, **window(m)}


def _gemma2_and_3(m: Metadata) -> dict[str, Any]:
    """Returns the settings that Gemma 2 and 3 share. By what scores are divided no metadata say: it is √D,
    and in the largest models √(hidden / heads), which llama.cpp tells by the number of layers."""
    whole = m.positive("block_count") == LARGEST[m.kind]
    scalar = m.positive("embedding_length") // m.positive("attention.head_count") if whole else m.head_dim
    return {"query_pre_attn_scalar": scalar, "rope_theta": m.get("rope.freq_base", LOCAL),
            "attn_logit_softcapping": m.get("attn_logit_softcapping"),
            "final_logit_softcapping": m.get("final_logit_softcapping")}


def gemma2(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json for Gemma 2."""
    return {**_gemma2_and_3(m), "sliding_window": m.get(WINDOW, 4096), "layer_types": m.layer_types(2)}


def gemma3(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json for Gemma 3. Without a window all layers are global."""
    types = m.layer_types(6) if m.get(WINDOW) else m.layer_types(1)
    return {**_gemma2_and_3(m), "sliding_window": m.get(WINDOW), "layer_types": types,
            "rope_local_base_freq": m.get(LOCAL_BASE, LOCAL)}


def gpt_oss(m: Metadata) -> dict[str, Any]:
    """Returns the settings of gpt-oss: a window in every other layer. YaRN's bounds are not whole numbers, as
    its config.json has it and no metadata say; llama.cpp rounds them."""
    scaling = rope_scaling(m)
    return {"layer_types": m.layer_types(2), "sliding_window": m.get(WINDOW, 128),
            "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False}}


def granite(m: Metadata) -> dict[str, Any]:
    """Returns the settings of Granite 3: its four factors are metadata. Without attention.scale scores are
    divided by √D."""
    if not m.get(UNROTATED, True): raise m.refusal(UNROTATED, "true: layers with rope")
    dim = m.head_dim
    if m.get("attention.scale") or not isinstance(dim, int) or dim < 1: return {}
    return {"attention_multiplier": dim ** -0.5}


def llama4(m: Metadata) -> dict[str, Any]:
    """Returns the settings of Llama 4: the size of chunks, their pattern and the temperature are llama.cpp's
    own. Models of 128 experts do not normalise queries and keys."""
    if m.get(WINDOW, CHUNK) not in (CHUNK,): raise m.refusal(WINDOW, f"{CHUNK}, or none")
    types = [FULL if each == FULL else CHUNKED for each in m.layer_types(4)]
    return {"layer_types": types, "use_qk_norm": m.get("expert_count") != UNNORMALISED}


def olmo2(m: Metadata) -> dict[str, Any]:
    """Returns the settings of OLMo 2, and OLMo 3, which is one with a window in three layers of four, whose
    rope is not scaled."""
    if not m.get(WINDOW): return {}
    base = m.get("rope.freq_base", 10_000.0)
    ropes = {FULL: {"rope_theta": base}, SLIDING: {"rope_theta": m.get(LOCAL_BASE, base)}}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": m.get(WINDOW),
            "layer_types": m.layer_types(4), "rope_parameters": ropes}


def phi3(m: Metadata) -> dict[str, Any]:
    """Returns the settings of Phi-3 and Phi-4: q | k | v are one tensor, gate | up another, named ffn_up. A
    part of each head may be rotated. What `longrope` divides frequencies by are two tensors. llama.cpp
    computes no window; the file says what config.json says, and so it is computed here."""
    whole = m.positive("embedding_length") // m.positive("attention.head_count")
    dim, rotated = m.get("attention.key_length", whole), m.get("rope.dimension_count")
    made = {"head_dim": dim, "sliding_window": m.get(WINDOW) or None,
            "original_max_position_embeddings": m.get(TRAINED)}
    if rotated not in (None, dim) and isinstance(dim, int) and dim > 0:
        made["partial_rotary_factor"] = m.positive("rope.dimension_count") / dim
    return made


SLIDES, PATTERNED = frozenset({WINDOW}), frozenset({WINDOW, PATTERN})
LLAMA = Architecture("LlamaForCausalLM", settings=mistral, reads=SLIDES, permuted=True)
# what a llama with experts is
MIXTRAL = Architecture("MixtralForCausalLM", MIXTRAL_NAMES, settings=window, reads=SLIDES, permuted=True,
                       fixed={"norm_topk_prob": True})
# whether weights of a token's experts are renormalised llama.cpp knows of an architecture
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM", settings=qwen, reads=SLIDES),
    "qwen3": Architecture("Qwen3ForCausalLM", settings=qwen, reads=SLIDES),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", settings=qwen, reads=SLIDES,
                             fixed={"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", settings=qwen, reads=SLIDES,
                             fixed={"norm_topk_prob": True}),
    "olmoe": Architecture("OlmoeForCausalLM", fixed={"norm_topk_prob": False}),
    "gemma": Architecture("GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", BOTH, reads=PATTERNED, settings=gemma2, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", BOTH, reads=PATTERNED | {LOCAL_BASE}, settings=gemma3,
                           norm_offset=1.0),
    "gpt-oss": Architecture("GptOssForCausalLM", GPT_OSS_NAMES,
                            {"expert_feed_forward_length": "intermediate_size"}, PATTERNED, settings=gpt_oss,
                            renamed={"post_attention_norm": "ffn_norm"}),
    "phi3": Architecture("Phi3ForCausalLM", PHI3_NAMES, reads=SLIDES, settings=phi3, whole_heads=False),
    "deepseek2": DEEPSEEK,
    "olmo2": Architecture("Olmo2ForCausalLM", OLMO_NAMES, reads=PATTERNED | {LOCAL_BASE}, settings=olmo2),
    # every fourth layer rotates nothing, which no metadata say
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True, fixed={"no_rope_layer_interval": 4}),
    "granite": Architecture("GraniteForCausalLM", settings=granite, permuted=True),
    "llama4": Architecture(
        "Llama4ForCausalLM", LLAMA4_NAMES,
        {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
         "interleave_moe_layer_step": "interleave_moe_layer_step"},
        PATTERNED, settings=llama4,
        fixed={"attention_chunk_size": CHUNK, "attn_temperature_tuning": True, "floor_scale": 8192,
               "attn_scale": 0.1, "no_rope_layer_interval": 4})}


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the architecture of a file. Raises `ModelError` for one that is not read."""
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ModelError(f"{file.path}: general.architecture is {brief(kind)}",
                         f"one of {', '.join(ARCHITECTURES)}", USE)
    return MIXTRAL if kind == "llama" and file.metadata.get("llama.expert_count") else ARCHITECTURES[kind]
