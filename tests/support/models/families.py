"""The families under test: what differs from `BASE`, and how it is saved."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

BASE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
          "v_head_dim": 20, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 12}
DELTA = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4}
CHANNELS = {"num_key_value_heads": 4, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
            "v_head_dim": 20, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_local_experts": 12,
            "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
NEMOTRON = {"head_dim": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 1,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 48, "num_hidden_layers": None}
HYBRID = ["linear_attention", "full_attention"]
# by default only logits are compared of these
SLOW = ("deepseek-v2-lite", "deepseek-v3-halves", "mistral-narrow", "qwen2-moe-mixed", "qwen3-moe-one",
        "gpt-oss-narrow", "gemma3-narrow", "smollm3-windows", "deepseek-v3-dense-first", "lfm2-biases",
        "qwen3.5-moe", "bamba-limits", "mamba2-tied", "granite-4", "falcon-h1-norms", "nemotron-h",
        "mamba-biases", "jamba-dense", "lfm3-bare", "olmo-hybrid-rope",
        "kimi-linear-groups", "ling-unbounded", "minimax-factors")
# families whose layers keep states
KEEPING_STATES = ("Lfm2", "Lfm2Moe", "Lfm3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Bamba", "Mamba2", "Mamba",
                  "FalconMamba", "Jamba", "GraniteMoeHybrid", "FalconH1", "NemotronH",
                  "OlmoHybrid", "KimiLinear", "BailingHybrid", "MiniMax")
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Case:
    """A model: its family, what differs from `BASE`, and how it is saved."""
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-sharded": Case("Llama", {"num_key_value_heads": 4}, {"max_shard_size": "100KB"}),
    "llama-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-yarn-mqa": Case("Llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    "mistral": Case("Mistral", {"sliding_window": 16, "head_dim": 32}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "mixtral": Case("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "qwen2-moe": Case("Qwen2Moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                                   "shared_expert_intermediate_size": 56, "decoder_sparse_step": 1,
                                   "mlp_only_layers": [1], "num_hidden_layers": 3}),
    "qwen3-moe": Case("Qwen3Moe", {"num_experts": 12, "num_experts_per_tok": 8, "moe_intermediate_size": 24,
                                   "head_dim": 24, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "olmoe": Case("Olmoe", {"num_experts": 7, "num_experts_per_tok": 1, "num_key_value_heads": 4,
                            "intermediate_size": 48, "pad_token_id": 0}),
    "gpt-oss": Case("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 4, "intermediate_size": 40,
                               "head_dim": 24, "sliding_window": 16, "num_hidden_layers": 3}),
    "llama4": Case("Llama4", {"num_local_experts": 5, "num_hidden_layers": 3, "head_dim": 24,
                              "intermediate_size": 48, "intermediate_size_mlp": 96, "moe_layers": [0, 2],
                              "attention_chunk_size": 16, "no_rope_layer_interval": 3, "floor_scale": 12,
                              "rope_parameters": LLAMA3}),
    "deepseek-v2": Case("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy",
                                       "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}),
    "deepseek-v2-lite": Case("DeepseekV2", {**LATENT, "q_lora_rank": 40, "first_k_dense_replace": 1,
                                            "num_hidden_layers": 3, "mlp_bias": True,
                                            "rope_parameters": {**YARN, "mscale": 0.7,
                                                                "mscale_all_dim": 0.9}}),
    "deepseek-v3": Case("DeepseekV3", {**LATENT, "q_lora_rank": 48, "first_k_dense_replace": 1, "n_group": 4,
                                       "topk_group": 2, "num_hidden_layers": 3,
                                       "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3-halves": Case("DeepseekV3", {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0,
                                              "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                              "rope_interleave": False, "attention_bias": True,
                                              "tie_word_embeddings": True}),
    "gemma2": Case("Gemma2", {"head_dim": 24, "sliding_window": 16, "num_hidden_layers": 3,
                              "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0,
                              "final_logit_softcapping": 3.0}),
    "gemma3": Case("Gemma3", {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 3,
                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                              "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0,
                                                                     "rope_theta": 1e6},
                                                  "sliding_attention": {"rope_type": "default",
                                                                        "rope_theta": 1e4}}}),
    "phi3": Case("Phi3", {"sliding_window": 24, "pad_token_id": 0}),
    "phi4": Case("Phi3", {"tie_word_embeddings": True, "pad_token_id": 0, "max_position_embeddings": 256,
                          "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
                                              "short_factor": [1.0] * 6,
                                              "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
                                              "partial_rotary_factor": 0.75,
                                              "original_max_position_embeddings": 48}}),
    "olmo2": Case("Olmo2", {"num_key_value_heads": 4, "pad_token_id": 0}),
    "olmo3": Case("Olmo3", {"num_hidden_layers": 4, "sliding_window": 20, "pad_token_id": 0}),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "granite": Case("Granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.1,
                                "residual_multiplier": 0.22, "logits_scaling": 4.0,
                                "tie_word_embeddings": True}),
    "gemma": Case("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "lfm2": Case("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                          "block_multiple_of": 32}),
    "lfm2-biases": Case("Lfm2", {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 4,
                                 "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "lfm2-moe": Case("Lfm2Moe", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                                 "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
                                 "moe_intermediate_size": 40, "routed_scaling_factor": 1.5}),
    "lfm3": Case("Lfm3", {"layer_types": ["conv", "sliding_attention", "full_attention"], "head_dim": 24,
                          "num_hidden_layers": 3, "sliding_window": 16, "pad_token_id": 0}),
    "lfm3-bare": Case("Lfm3", {"layer_types": ["sliding_attention", "conv"], "use_sandwich_norm": False,
                               "use_attention_gate": False, "attention_bias": True, "conv_bias": True,
                               "sliding_window": 5, "pad_token_id": 0}),
    "minimax-m2": Case("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 12,
                                     "head_dim": 24, "intermediate_size": 48}),
    "qwen3-next": Case("Qwen3Next", {**DELTA, "num_hidden_layers": 4, "num_experts": 8,
                                     "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                     "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3.5": Case("Qwen3_5", {**DELTA, "layer_types": ["linear_attention", "full_attention"],
                                "tie_word_embeddings": True}),
    "qwen3.5-moe": Case("Qwen3_5Moe", {**DELTA, "num_hidden_layers": 4, "num_experts": 8,
                                       "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                       "shared_expert_intermediate_size": 48}),
    "olmo-hybrid": Case("OlmoHybrid", {"linear_key_head_dim": 16, "linear_num_key_heads": 2,
                                       "linear_num_value_heads": 4, "layer_types": HYBRID, "pad_token_id": 0,
                                       "num_key_value_heads": 4, "rope_parameters": {"rope_theta": None}}),
    "olmo-hybrid-rope": Case("OlmoHybrid", {"num_hidden_layers": 4, "linear_allow_neg_eigval": False,
                                            "pad_token_id": 0, "linear_conv_kernel_dim": 3,
                                            "tie_word_embeddings": True}),
    "kimi-linear": Case("KimiLinear", {**CHANNELS, "linear_head_dim": 16, "linear_num_heads": 4,
                                       "layer_types": HYBRID, "num_hidden_layers": 2}),
    "kimi-linear-groups": Case("KimiLinear", {**CHANNELS, "linear_head_dim": 24, "linear_num_heads": 2,
                                              "linear_conv_kernel_dim": 3, "q_lora_rank": 20, "n_group": 2,
                                              "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2,
                                              "num_hidden_layers": 6}),
    "ling": Case("BailingHybrid", {**CHANNELS, "head_dim": 16, "layer_group_size": 2, "n_group": 4,
                                   "topk_group": 2, "first_k_dense_replace": 1}),
    "ling-unbounded": Case("BailingHybrid", {**CHANNELS, "head_dim": 16, "layer_group_size": 3, "n_group": 1,
                                             "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 20,
                                             "num_hidden_layers": 3, "kda_safe_gate": False,
                                             "short_conv_kernel_size": 3}),
    "minimax": Case("MiniMax", {"head_dim": 16, "num_local_experts": 4, "intermediate_size": 48,
                                "layer_types": HYBRID, "block_size": 16, "pad_token_id": 0}),
    "minimax-factors": Case("MiniMax", {"head_dim": 24, "num_local_experts": 4, "intermediate_size": 48,
                                        "num_hidden_layers": 3, "full_attn_alpha_factor": 1.2,
                                        "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.5,
                                        "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.1,
                                        "mlp_beta_factor": 0.6, "sliding_window": 16, "pad_token_id": 0}),
    "bamba": Case("Bamba", {**MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3}),
    "bamba-limits": Case("Bamba", {**MAMBA, "attn_layer_indices": [0], "mamba_n_groups": 1,
                                   "mamba_proj_bias": True, "mamba_conv_bias": False, "mlp_bias": True,
                                   "time_step_limit": (0.01, 0.5), "attention_bias": True}),
    "mamba2": Case("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "mamba2-tied": Case("Mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 24, "n_groups": 1,
                                   "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True,
                                   "residual_in_fp32": False}),
    "granite-4": Case("GraniteMoeHybrid", {**MAMBA, "layer_types": HYBRID, "num_local_experts": 0,
                                           "num_experts_per_tok": 0, "shared_intermediate_size": 80,
                                           "embedding_multiplier": 12.0, "attention_multiplier": 0.1,
                                           "residual_multiplier": 0.22, "logits_scaling": 4.0,
                                           "tie_word_embeddings": True}),
    "granite-4-moe": Case("GraniteMoeHybrid", {**MAMBA, "layer_types": HYBRID, "num_local_experts": 6,
                                               "num_experts_per_tok": 2, "shared_intermediate_size": 80,
                                               "position_embedding_type": "rope"}),
    "falcon-h1": Case("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "head_dim": 24, "lm_head_multiplier": 3.0,
                                   "embedding_multiplier": 2.5, "mlp_multipliers": [0.7, 1.3],
                                   "key_multiplier": 0.6, "attention_out_multiplier": 0.9,
                                   "attention_in_multiplier": 1.2, "ssm_in_multiplier": 1.1,
                                   "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_out_multiplier": 0.4}),
    "falcon-h1-norms": Case("FalconH1", {**MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True,
                                         "mamba_norm_before_gate": False, "projectors_bias": True,
                                         "mlp_bias": True, "tie_word_embeddings": True}),
    "nemotron-h": Case("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "M-M*-", "n_groups": 2}),
    "nemotron-h-moe": Case("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "ME*E-", "n_group": 2,
                                         "topk_group": 1, "routed_scaling_factor": 2.5, "mlp_bias": True,
                                         "use_conv_bias": False, "time_step_min": 0.8}),
    "nemotron-h-latent": Case("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "ME*E",
                                            "moe_latent_size": 32, "residual_in_fp32": True}),
    "mamba": Case("Mamba", {"state_size": 8}),
    "falcon-mamba": Case("FalconMamba", {"intermediate_size": 96, "time_step_rank": 5,
                                         "tie_word_embeddings": False}),
    "jamba": Case("Jamba", {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1,
                            "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 5,
                            "num_experts_per_tok": 2, "intermediate_size": 48, "mamba_d_state": 8,
                            "pad_token_id": 0}),
    # windows smaller than a page, odd widths, layers that are unlike, one expert, all experts
    "mistral-narrow": Case("Mistral", {"sliding_window": 3, "head_dim": 40, "num_key_value_heads": 1,
                                       "hidden_act": "gelu", "rope_parameters": YARN}),
    "qwen2-moe-mixed": Case("Qwen2Moe", {"num_experts": 5, "num_experts_per_tok": 5, "qkv_bias": False,
                                         "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
                                         "decoder_sparse_step": 2, "mlp_only_layers": [3],
                                         "num_hidden_layers": 4, "use_sliding_window": True,
                                         "sliding_window": 5, "layer_types": MIXED,
                                         "tie_word_embeddings": True}),
    "qwen3-moe-one": Case("Qwen3Moe", {"num_experts": 20, "num_experts_per_tok": 1, "attention_bias": True,
                                       "moe_intermediate_size": 40, "head_dim": 20, "norm_topk_prob": False,
                                       "decoder_sparse_step": 1, "rope_parameters": LLAMA3}),
    "gpt-oss-narrow": Case("GptOss", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 40,
                                      "intermediate_size": 56, "sliding_window": 1, "layer_types": MIXED,
                                      "num_hidden_layers": 4, "attention_bias": False,
                                      "tie_word_embeddings": True}),
    "gemma3-narrow": Case("Gemma3", {"head_dim": 12, "sliding_window": 3, "num_hidden_layers": 4,
                                     "layer_types": MIXED, "query_pre_attn_scalar": 8,
                                     "final_logit_softcapping": 3.0, "attention_bias": True,
                                     "rope_parameters": {"full_attention": YARN,
                                                         "sliding_attention": {"rope_type": "default",
                                                                               "rope_theta": 100.0}}}),
    "smollm3-windows": Case("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1],
                                        "use_sliding_window": True, "sliding_window": 7,
                                        "layer_types": MIXED, "attention_bias": True, "mlp_bias": True,
                                        "pad_token_id": 0}),
    "mamba-biases": Case("Mamba", {"intermediate_size": 192, "state_size": 5, "conv_kernel": 3,
                                   "use_bias": True, "use_conv_bias": False, "residual_in_fp32": False,
                                   "time_step_rank": 7, "tie_word_embeddings": False}),
    "jamba-dense": Case("Jamba", {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 0,
                                  "num_experts": 1, "mamba_expand": 3, "mamba_dt_rank": 9,
                                  "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3,
                                  "tie_word_embeddings": True, "pad_token_id": 0}),
    "deepseek-v3-dense-first": Case("DeepseekV3", {**LATENT, "q_lora_rank": None, "n_shared_experts": 3,
                                                   "first_k_dense_replace": 2, "num_hidden_layers": 3,
                                                   "n_routed_experts": 10, "n_group": 2, "topk_group": 1,
                                                   "num_experts_per_tok": 5, "norm_topk_prob": False,
                                                   "attention_bias": True, "rope_parameters": LLAMA3}),
}


def saved(case: Case, directory: Path, seed: int) -> Path:
    """A random model in a directory."""
    torch.manual_seed(seed)
    network = getattr(transformers, f"{case.family}ForCausalLM")
    fields = {**BASE, **case.fields}
    if fields["num_hidden_layers"] is None: del fields["num_hidden_layers"]     # those of a pattern
    model = network(network.config_class(**fields))
    for parameter_name, parameter in model.named_parameters():
        # biases and norms are born 0 and 1, which would hide a bias or a norm that is not applied
        mean = 1.0 if "norm" in parameter_name else 0.0
        if parameter.ndim == 1: torch.nn.init.normal_(parameter, mean, 0.3)
    # a bias of choices, born 0
    for buffer_name, buffer in model.named_buffers():
        if "e_score_correction_bias" in buffer_name: torch.nn.init.normal_(buffer, 0.0, 0.3)
    model.save_pretrained(directory, **case.save)
    return directory
