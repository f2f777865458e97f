"""The language model of a multimodal directory: its part of config.json, and its tensors by their own names.

Text is read and written; what reads images or sound is left out here. Qwen2.5-VL reads images (qwen_vl/);
of other models prompts with them are refused elsewhere.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tinygrad_nv.errors import ModelError, brief

from .model_types import SIZES, architectures_of

T = TypeVar("T")
QWEN_VL = "Qwen2_5_VLForConditionalGeneration"
LLAVA, MISTRAL3 = "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"
# architectures whose text_config is that of a causal language model, and its model_type where it says none
ARCHITECTURES = {"Gemma3ForConditionalGeneration": "gemma3_text",
                 "Llama4ForConditionalGeneration": "llama4_text", LLAVA: "llama",
                 "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
                 "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
                 MISTRAL3: "mistral", QWEN_VL: "qwen2_5_vl_text"}
TIES = ("Gemma3ForConditionalGeneration", MISTRAL3)     # unless they say otherwise
# of a Mistral 3 without a text_config
MISTRAL3_TEXT = {"hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40, "intermediate_size": 32_768,
                 "vocab_size": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None}
KINDS = {"gemma3_text": "Gemma3ForCausalLM", "llama": "LlamaForCausalLM",
         "llama4_text": "Llama4ForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
         "qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
         "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
# of a whole model, where its text_config says nothing
SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
TIED = "tie_word_embeddings"    # the head is outside the language model, so the whole model says it first
# transformers has named the language model's tensors so, the first before its version 5
PREFIXES = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.", "lm_head.": "lm_head."}
# of state-space models, the last in older files
BACKBONE = dict.fromkeys(("backbone.embeddings.weight", "backbone.embedding.weight"),
                         "model.embed_tokens.weight")
VISUAL = ("visual.", "model.visual.")       # tensors of Qwen2.5-VL's vision tower


def language_config(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config.json of the language model; that of a model without other parts as it is. Raises
    `ModelError`."""
    found = next((each for each in architectures_of(data)
                  if isinstance(each, str) and each in ARCHITECTURES), None)
    if found is None: return data
    text = data.get("text_config")
    if found == QWEN_VL: text = _of_qwen_vl(data if text is None else text)
    if text is None: text = MISTRAL3_TEXT if found == MISTRAL3 else {}
    kind = (text.get("model_type") or ARCHITECTURES[found]) if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in KINDS:
        raise ModelError(f"{name}: text_config is of model_type {brief(kind)}", f"one of: {', '.join(KINDS)}",
                         "use a model of a supported family as it was published")
    shared = {key: data[key] for key in SHARED if data.get(key) is not None and text.get(key) is None}
    tied = data.get(TIED)
    if tied is None and found in TIES: tied = True
    # LLaVA's text_config may tie them, too
    if tied is not None and not (found == LLAVA and text.get(TIED)): shared[TIED] = tied
    return {**SIZES.get(kind, {}), **text, **shared, "architectures": [KINDS[kind]]}


def _of_qwen_vl(text: Any) -> Any:
    """The text_config of Qwen2.5-VL, whose three positions are equal for text: a plain rope. Published files
    have its fields beside vision_config."""
    if not isinstance(text, dict): return text
    made = {**text, "model_type": "qwen2_5_vl_text"}
    made.pop("vision_config", None)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given := text.get(key), dict) and "mrope_section" in given:
            made[key] = {name: value for name, value in given.items()
                         if name not in ("type", "rope_type", "mrope_section")}
    return made


def language_entries(entries: dict[str, T], spell: Callable[[str], str] = str) -> dict[str, T]:
    """The language model's tensors by the names they have in a causal language model without other parts, by
    `spell` those of its family."""
    return {spell(name): entry for name, entry in _without_other_parts(entries).items()}


def _without_other_parts(entries: dict[str, T]) -> dict[str, T]:
    if "embed_tokens.weight" in entries:    # of a model without its head, as embedding models are saved
        return {name if name == "lm_head.weight" else f"model.{name}": entry
                for name, entry in entries.items()}
    for found in ("model.embeddings.weight", "model.word_embeddings.weight"):   # of Nemotron-H, and of Ling
        if found in entries: return {"model.embed_tokens.weight" if name == found else name: entry
                                     for name, entry in entries.items()}
    if not BACKBONE.keys().isdisjoint(entries):
        return {BACKBONE.get(name, name.replace("backbone.", "model.", 1)): entry
                for name, entry in entries.items()}
    if not any(name.startswith(prefix) for name in entries for prefix in PREFIXES if prefix != "lm_head."):
        return {name: entry for name, entry in entries.items() if not name.startswith(VISUAL)}
    return {PREFIXES[prefix] + name.removeprefix(prefix): entry for name, entry in entries.items()
            for prefix in PREFIXES if name.startswith(prefix)}
