"""Settings that a config.json leaves to its model_type: the architecture, where it names none, and the sizes
of a part's configuration, which says only what differs from its class in transformers.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# transformers' classes with a head for text, else without one
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "granite": "GraniteForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "llama4_text": "Llama4ForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM", "lfm3": "Lfm3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM", "bailing_hybrid": "BailingHybridForCausalLM",
    "bamba": "BambaForCausalLM", "mamba2": "Mamba2ForCausalLM", "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM", "nemotron_h": "NemotronHForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration", "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "bert": "BertModel", "camembert": "CamembertModel", "distilbert": "DistilBertModel",
    "eurobert": "EuroBertModel", "gte": "GteModel", "jina_embeddings_v3": "JinaEmbeddingsV3Model",
    "modernbert": "ModernBertModel", "mpnet": "MPNetModel", "nomic_bert": "NomicBertModel",
    "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
# of parts; what families say is not repeated
_LLAMA = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
          "num_attention_heads": 32, "max_position_embeddings": 2048}
_QWEN = {**_LLAMA, "vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA, "qwen2": _QWEN, "qwen3": _QWEN,
    "mistral": {**_LLAMA, "intermediate_size": 14_336, "max_position_embeddings": 131_072},
    "qwen3_5_text": {**_QWEN, "vocab_size": 248_320, "intermediate_size": 12_288, "num_attention_heads": 16},
    "qwen3_5_moe_text": {**_QWEN, "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
                         "num_attention_heads": 16},
    "qwen2_5_vl_text": {"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
                        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1e6}}


def architectures_of(data: Mapping[str, Any]) -> list[Any]:
    """The architectures that a config.json names, or that of its model_type."""
    listed = data.get("architectures")
    if isinstance(listed, list) and listed: return listed
    known = ARCHITECTURES.get(str(data.get("model_type")))
    return [] if known is None or listed not in (None, []) else [known]
