"""Every field of config.json that some family honours, set in every family: logits are those of transformers'
class for that family, or the field is refused in words."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ModelError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.families import FAMILIES as HAVE
from tinygrad_nv.models.llama import Llama

# every field is tried of these families by default, of the others those of `QUICK`
FIRST = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
FAMILIES = [name.removesuffix("ForCausalLM") for name in HAVE]
BASE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                        "max_position_embeddings": 64, "pad_token_id": None}
TOKENS = [int(i) for i in np.random.default_rng(0).integers(0, 64, 32)]     # more than a window of 8
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SMALL = {"original_max_position_embeddings": 16}


def rope(*given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """rope_parameters of all of these."""
    return {"rope_parameters": {key: value for each in (*given, more) for key, value in each.items()}}


# what is set in each family; None is written as null, as files have it
FIELDS: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 500.0},
    "theta within": rope(rope_theta=500.0),
    "theta in both": {"rope_theta": 500.0, **rope(rope_theta=50.0)},
    "theta beside": {"rope_theta": 500.0, **rope(rope_type="default")},
    "scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "scaling and parameters": {"rope_scaling": {"type": "linear", "factor": 4.0}, **rope(rope_theta=500.0)},
    "scaling is null": {"rope_scaling": None, "rope_theta": 500.0},
    "linear": rope(rope_type="linear", factor=4.0), "linear without factor": rope(rope_type="linear"),
    "dynamic": rope(rope_type="dynamic", factor=4.0), "dynamic, no factor": rope(rope_type="dynamic"),
    "llama3": rope(LLAMA3, SMALL), "llama3 without original": rope(LLAMA3),
    "llama3, original beside": {**rope(LLAMA3), **SMALL},
    "llama3, original in both": {**rope(LLAMA3, original_max_position_embeddings=48), **SMALL},
    "yarn": rope(YARN, SMALL), "yarn without original": rope(YARN),
    "yarn, original in both": {**rope(YARN, original_max_position_embeddings=48), **SMALL},
    "yarn betas": rope(YARN, SMALL, beta_fast=4.0, beta_slow=0.5),
    "yarn attention_factor": rope(YARN, SMALL, attention_factor=2.0),
    "yarn mscale": rope(YARN, SMALL, mscale=2.0, mscale_all_dim=0.5),
    "yarn truncate": rope(YARN, SMALL, truncate=False, beta_fast=4.0),
    "linear, original beside": {**rope(rope_type="linear", factor=2.0), **SMALL},
    "longrope": rope(rope_type="longrope", factor=4.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4),
    "proportional": rope(rope_type="proportional", partial_rotary_factor=0.5),
    "nested": {"layer_types": ["full_attention"] * 2, **rope(full_attention={"rope_theta": 500.0})},
    "partial": {"partial_rotary_factor": 0.5}, "partial within": rope(partial_rotary_factor=0.5),
    "partial and theta": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
    "partial of all": {"partial_rotary_factor": 1.0, **rope(rope_type="linear", factor=4.0)},
    "partial is null": {"partial_rotary_factor": None},
    "partial linear": {"partial_rotary_factor": 0.5, **rope(rope_type="linear", factor=4.0)},
    "partial linear within": rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5),
    "partial yarn": {"partial_rotary_factor": 0.5, **rope(YARN, SMALL)},
    "head_dim": {"head_dim": 16}, "kv heads": {"num_key_value_heads": 1},
    "kv heads are null": {"num_key_value_heads": None},
    "attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True},
    "qkv_bias": {"qkv_bias": True, "use_bias": True, "no_bias": False}, "qk_norm": {"qk_norm": True},
    "use_qk_norm": {"use_qk_norm": True},
    "window": {"sliding_window": 8}, "no window": {"sliding_window": None},
    "windows": WINDOWS, "windows from 1": {**WINDOWS, "max_window_layers": 1},
    "windows are not used": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    "windows null": {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    "layer types": {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    "layer types over layers": {**WINDOWS, "layer_types": ["full_attention"] * 2, "max_window_layers": 0},
    "layer types without windows": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
    "layer types, window null": {"use_sliding_window": True, "sliding_window": None,
                                 "layer_types": ["sliding_attention"] * 2},
    "layer types of old": {**WINDOWS, "layer_types": ["attention", "sliding_attention"]},
    "layer types of chunks": {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8},
    "tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False},
    "gelu": {"hidden_act": "gelu"}, "gelu_new": {"hidden_act": "gelu_new"}, "swish": {"hidden_act": "swish"},
    "gelu tanh": {"hidden_act": "gelu_pytorch_tanh"}, "silu": {"hidden_act": "silu"},
    "relu": {"hidden_act": "relu"}, "no act": {"hidden_act": None},
    "hidden_activation": {"hidden_activation": "gelu"},
    "both acts": {"hidden_act": "gelu", "hidden_activation": "silu"},
    "eps": {"rms_norm_eps": 0.1}, "eps is null": {"rms_norm_eps": None},
    "other eps": {"layer_norm_eps": 0.5, "norm_eps": 0.5, "layer_norm_epsilon": 0.5},
    "attn_logit_softcapping": {"attn_logit_softcapping": 1.0},
    "final_logit_softcapping": {"final_logit_softcapping": 1.0},
    "query_pre_attn_scalar": {"query_pre_attn_scalar": 64},
    **{name: {name: 3.0} for name in ("attention_multiplier", "residual_multiplier", "embedding_multiplier",
                                      "logits_scaling", "logit_scale", "scale_emb", "clip_qkv")},
    "experts": {"num_experts": 4, "num_local_experts": 4}, "pretraining_tp": {"pretraining_tp": 2},
    "dropout": {"attention_dropout": 0.5}, "chunks": {"attention_chunk_size": 8},
    "bidirectional": {"use_bidirectional_attention": True}, "not causal": {"is_causal": False},
    "per layer": {"per_layer_config": {"1": {"intermediate_size": 40}}}, "pad": {"pad_token_id": TOKENS[0]},
}
# tried of the families of multi-head latent attention
LATENT_FIELDS: dict[str, dict[str, Any]] = {
    "no q rank": {"q_lora_rank": None},
    "other sizes": {"kv_lora_rank": 12, "v_head_dim": 10, "q_lora_rank": 9},
    "halves": {"rope_interleave": False}, "interleaved is null": {"rope_interleave": None},
    "renormalised": {"norm_topk_prob": True}, "not renormalised": {"norm_topk_prob": False},
    "groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "groups without a method": {"n_group": 2, "topk_group": 1}, "one group": {"n_group": 1, "topk_group": 1},
    "too many groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 3},
    "groups of one": {"n_group": 4, "topk_group": 2}, "no groups": {"n_group": None, "topk_group": None},
    "method": {"topk_method": "noaux_tc"}, "no method": {"topk_method": None},
    "score": {"scoring_func": "sigmoid"}, "other score": {"scoring_func": "softmax"},
    "scaling of weights": {"routed_scaling_factor": 3.5}, "no dense layer": {"first_k_dense_replace": 0},
    "dense layers": {"first_k_dense_replace": 2}, "every second": {"moe_layer_freq": 2},
    "shared experts": {"n_shared_experts": 3}, "draft layers": {"num_nextn_predict_layers": 1},
    "top 1": {"num_experts_per_tok": 1}, "too many experts": {"num_experts_per_tok": 5},
    "six experts": {"n_routed_experts": 6, "num_experts": 6, "num_local_experts": 6},
    "yarn mscale alone": rope(YARN, SMALL, mscale_all_dim=0.7),
    "yarn mscale of 0": rope(YARN, SMALL, mscale=1.0, mscale_all_dim=0),
    "linear and mscale": rope(rope_type="linear", factor=4.0, mscale_all_dim=1.0)}
# The reference refuses, and so may we not: what a file must mean is plain.
LENIENT = {("Mistral", "kv heads are null"), ("Gemma", "kv heads are null"),
           ("Gemma2", "kv heads are null"), ("Gemma3", "kv heads are null"), ("Phi3", "partial is null"),
           *((family, "kv heads are null") for family in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss",
                                                            "Llama4")),
           ("Qwen2Moe", "windows null"),     # no layer has one
           *((family, "kv heads are null") for family in ("Lfm2", "Lfm2Moe", "Lfm3", "Qwen3Next", "Qwen3_5",
                                                            "Qwen3_5Moe", "NemotronH", "MiniMaxM2")),
           ("MiniMax", "kv heads are null"),
           ("OlmoHybrid", "layer types over layers"),   # attention alone
           ("Bamba", "dynamic"),    # its class divides by 0
           # no layer has rope
           *((family, name) for name in FIELDS if name.startswith(("linear", "dynamic", "llama3", "yarn",
                                                                   "longrope", "proportional"))
             for family in ("Mamba", "Mamba2", "FalconMamba", "Jamba", "NemotronH", "GraniteMoeHybrid",
                            "KimiLinear")),
           ("DeepseekV3", "head_dim")}       # qk_rope_head_dim says it


QUICK = {"theta within", "scaling and parameters", "linear", "yarn, original in both", "longrope", "nested",
         "partial", "partial linear", "head_dim", "kv heads are null", "attention_bias", "mlp_bias",
         "qkv_bias", "window", "windows from 1", "layer types", "layer types without windows", "tied", "gelu",
         "hidden_activation", "eps", "attn_logit_softcapping", "final_logit_softcapping",
         "residual_multiplier", "experts", "not causal"}
# and what is set in families that have it
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "GptOss": {"alpha": {"swiglu_alpha": 1.5}, "limit": {"swiglu_limit": 3.0},
               "no biases": {"attention_bias": False}, "bare rope": rope(rope_type="default"),
               "windows of all": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
               "head_dim is left out": {"head_dim": 64, "rms_norm_eps": 1e-5}},
    "Llama4": {"no norm": {"use_qk_norm": False},
               "no norm, yarn": {"use_qk_norm": False, **rope(YARN, SMALL)},
               "no temperature": {"attn_temperature_tuning": False, "no_rope_layers": [0, 1]},
               "temperature": {"floor_scale": 4, "attn_scale": 0.5, "no_rope_layer_interval": 2},
               "all have rope": {"no_rope_layers": [1, 1]}, "dense first": {"moe_layers": [1]},
               "every other": {"interleave_moe_layer_step": 2}, "no chunks": {"attention_chunk_size": None},
               "chunks of 12": {"attention_chunk_size": 12, "no_rope_layer_interval": 2},
               "chunks without rope": {"attention_chunk_size": 8, "no_rope_layers": [0, 1],
                                       "layer_types": ["chunked_attention", "full_attention"]},
               "width": {"intermediate_size_mlp": 40, "moe_layers": []}},
    "Lfm3": {"no norms": {"use_sandwich_norm": False}, "no gates": {"use_attention_gate": False},
             "biases without gates": {"use_attention_gate": False, "attention_bias": True},
             "conv_bias": {"conv_bias": True}, "taps": {"conv_L_cache": 3}, "one tap": {"conv_L_cache": 1},
             "no layer types": {"layer_types": None, "num_hidden_layers": 3},
             "windows without rope": {"layer_types": ["sliding_attention", "conv"], "sliding_window": 5},
             "own ropes": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
                           "rope_parameters": {
                               "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                               "full_attention": {"rope_type": "proportional", "rope_theta": 500.0,
                                                  "partial_rotary_factor": 0.6, "factor": 2.0}}}},
    "MiniMaxM2": {"rotary_dim": {"rotary_dim": 8}, "one expert": {"num_experts_per_tok": 1},
                  "both parts": {"rotary_dim": 8, "partial_rotary_factor": 0.75}},
    "MiniMax": {"rotary_dim": {"rotary_dim": 4}, "blocks of 1": {"block_size": 1},
                "no layer types": {"layer_types": None, "num_hidden_layers": 3},
                "factors": {"full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.8,
                            "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.7,
                            "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0}},
    "OlmoHybrid": {"no rope": {"rope_theta": None}, "no rope within": rope(rope_theta=None),
                   "rates below 1": {"linear_allow_neg_eigval": False},
                   "taps": {"linear_conv_kernel_dim": 2}, "one tap": {"linear_conv_kernel_dim": 1},
                   "no layer types": {"layer_types": None, "num_hidden_layers": 5},
                   "no sizes": {"linear_key_head_dim": None, "linear_value_head_dim": None,
                                "linear_num_key_heads": None, "linear_num_value_heads": None},
                   "no width of values": {"linear_value_head_dim": None}},
    "KimiLinear": {"section": {"layer_types": None, "linear_attn_config": {
                       "full_attn_layers": [1], "kda_layers": [2], "head_dim": 6, "num_heads": 3,
                       "short_conv_kernel_size": 3}},
                   "a layer twice": {"layer_types": None, "linear_attn_config": {
                       "full_attn_layers": [1, 2], "kda_layers": [2]}},
                   "their keys": {"moe_renormalize": False, "num_expert_group": 2, "num_experts_per_token": 1,
                                  "num_shared_experts": 2},
                   "no layer types": {"layer_types": None, "num_hidden_layers": 6},
                   "experts": {"mlp_layer_types": ["sparse", "dense"]}, "positions": {"mla_use_nope": False},
                   "every second": {"moe_layer_freq": 2}, "score": {"moe_router_activation_func": "softmax"},
                   "no q rank": {"q_lora_rank": None}, "scaling of weights": {"routed_scaling_factor": 3.5}},
    "BailingHybrid": {"unbounded": {"kda_safe_gate": False}, "bound": {"kda_lower_bound": -2.0},
                      "no layer types": {"layer_types": None, "num_hidden_layers": 4},
                      "taps": {"short_conv_kernel_size": 2}, "other taps": {"linear_conv_kernel_dim": 3},
                      "other heads": {"linear_head_dim": 6, "linear_num_heads": 3},
                      "experts": {"mlp_layer_types": ["sparse", "dense"]}, "no q rank": {"q_lora_rank": None},
                      "their keys": {"moe_renormalize": False, "num_expert_group": 2,
                                     "num_experts_per_token": 1, "num_shared_experts": 2}}}
# those of them that are tried by default
QUICK_OWN = {"alpha", "no biases", "no norm", "temperature", "chunks of 12", "dense first", "factors",
             "rates below 1", "section", "bound"}
# so that experts are few and small
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 40, "intermediate_size_mlp": 56}
LATENT = ("DeepseekV2", "DeepseekV3")
# layers that keep states, and attention
DELTA = {"head_dim": 16, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
         "shared_intermediate_size": 40}
CHANNELS = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "layer_types": DELTA["layer_types"]}
HYBRID: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Lfm3": {"layer_types": ["conv", "full_attention"], "pad_token_id": 0},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "OlmoHybrid": {**DELTA, "num_key_value_heads": 4},
    "Qwen3Next": DELTA, "Qwen3_5": DELTA, "Qwen3_5Moe": DELTA,
    "MiniMax": {"layer_types": DELTA["layer_types"], "block_size": 16},
    "KimiLinear": {**CHANNELS, "linear_head_dim": 8, "linear_num_heads": 2},
    "BailingHybrid": {**CHANNELS, "head_dim": 8, "layer_group_size": 2},
    "Bamba": {**MAMBA, "attn_layer_indices": [1]}, "FalconH1": {**MAMBA, "mamba_d_ssm": 64},
    "GraniteMoeHybrid": {**MAMBA, "layer_types": DELTA["layer_types"]},
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2},
    "NemotronH": {"layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 4,
                  "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}}
MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "Llama4", "Lfm2Moe", "Qwen3Next",
            "Qwen3_5Moe", "GraniteMoeHybrid", "NemotronH", "MiniMaxM2", "KimiLinear",
            "BailingHybrid", "MiniMax", *LATENT)
SPELLED = ("OlmoHybrid", "Lfm3", "KimiLinear", "BailingHybrid")     # files have other names than modules
SIZES = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12,
         "qk_rope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1, "n_routed_experts": 4,
         "n_group": 1, "topk_group": 1}
FEW = {"attention_bias", "yarn mscale", "halves", "groups", "score", "kv heads"}  # of `LATENT`, by default


def own(family: str) -> dict[str, dict[str, Any]]:
    """Fields that are tried of this family alone."""
    return LATENT_FIELDS if family in LATENT else OWN.get(family, {})


def tried() -> list[Any]:
    """Families and fields; slow ones are marked."""
    def quick(family: str, name: str) -> bool:
        few = QUICK_OWN if family in OWN else FEW if family in LATENT else QUICK
        return family in FIRST or name in few
    return [pytest.param(family, name, id=f"{family}-{name}",
                         marks=[] if quick(family, name) else [pytest.mark.slow])
            for family in FAMILIES for name in {**FIELDS, **own(family)}]


def raw_config(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """config.json as a person would write it, which no class has completed."""
    more = {**(EXPERTS if family in MIXTURES else {}), **(SIZES if family in LATENT else {}),
            **HYBRID.get(family, {})}
    kind = getattr(transformers, f"{family}ForCausalLM").config_class.model_type
    return {**BASE, **more, "architectures": [f"{family}ForCausalLM"], "model_type": kind, **fields}


def theirs(family: str, fields: dict[str, Any]) -> tuple[torch.nn.Module, np.ndarray]:
    """transformers' model for a raw config, in which every parameter tells, and its logits (T, vocab)."""
    cls = getattr(transformers, f"{family}ForCausalLM")
    model = cls(cls.config_class.from_dict(raw_config(family, fields))).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    with torch.no_grad(): return model, model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()


def ours(directory: Path, family: str, fields: dict[str, Any], theirs: torch.nn.Module) -> np.ndarray:
    """Our logits of the same files."""
    # which splits stacked experts, and renames
    if family in (*MIXTURES, *SPELLED): theirs.save_pretrained(directory)
    else: save_file(stored(theirs), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw_config(family, fields)))
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model(Tensor([TOKENS], dtype=dtypes.int32, device="CPU"))[0].numpy()


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What save_pretrained would write: a tied head once."""
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings: del state["lm_head.weight"]
    return {name: tensor.contiguous() for name, tensor in state.items()}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("family", "name"), tried())
def test_a_field_means_what_it_means_to_transformers(tmp_path: Path, family: str, name: str):
    """max |logit − theirs| ≤ 2e-4 · max |logit|, as test_parity.py has it. What transformers refuses or
    cannot run is refused, but for `LENIENT`."""
    fields = {**FIELDS, **own(family)}[name]
    try: model, expected = theirs(family, fields)
    except Exception as error:  # whatever its classes raise
        if (family, name) in LENIENT: return
        (tmp_path / "config.json").write_text(json.dumps(raw_config(family, fields)))
        with pytest.raises(ModelError, match=r"config\.json: "): read_config(tmp_path)
        print(f"both refuse: {type(error).__name__}")
        return
    try: logits = ours(tmp_path, family, fields, model)
    except ModelError as error: refusal = str(error)
    else: refusal = ""
    if refusal: assert any(key in refusal for key in (*fields, "rope type", "rope parameters")), refusal
    else: assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()
