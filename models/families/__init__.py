"""The families of models, a small file each: what of `ModelConfig` differs from LLaMA's.

`FAMILIES` has them by the architecture of config.json, `EMBEDDERS` those of embedding models (encoder.py
has encoders). family.py has the record, and what several use. A family is loaded when it is asked for.
"""
from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from .family import Family

# its file, and its name there
PLACES = {
    "LlamaForCausalLM": "llama.FAMILY", "MistralForCausalLM": "mistral.FAMILY",
    "Qwen2ForCausalLM": "qwen.QWEN2", "Qwen3ForCausalLM": "qwen.QWEN3", "GemmaForCausalLM": "gemma.GEMMA",
    "Gemma2ForCausalLM": "gemma.GEMMA2", "Gemma3ForCausalLM": "gemma.GEMMA3",
    "Phi3ForCausalLM": "phi3.FAMILY", "Olmo2ForCausalLM": "olmo.OLMO2", "Olmo3ForCausalLM": "olmo.OLMO3",
    "SmolLM3ForCausalLM": "smollm3.FAMILY", "GraniteForCausalLM": "granite.FAMILY",
    "GptOssForCausalLM": "gpt_oss.FAMILY", "Llama4ForCausalLM": "llama4.FAMILY",
    "MixtralForCausalLM": "mistral.MIXTRAL", "Qwen2MoeForCausalLM": "qwen.QWEN2_MOE",
    "Qwen3MoeForCausalLM": "qwen.QWEN3_MOE", "OlmoeForCausalLM": "olmo.OLMOE",
    "Lfm2ForCausalLM": "lfm2.LFM2", "Lfm3ForCausalLM": "lfm3.FAMILY",
    "MiniMaxM2ForCausalLM": "minimax_m2.FAMILY", "Qwen3NextForCausalLM": "qwen3_next.FAMILY",
    "Qwen3_5ForCausalLM": "qwen3_next.QWEN3_5", "Qwen3_5MoeForCausalLM": "qwen3_next.QWEN3_5_MOE",
    "OlmoHybridForCausalLM": "olmo_hybrid.FAMILY",
    "KimiLinearForCausalLM": "kimi_linear.KIMI", "BailingHybridForCausalLM": "kimi_linear.LING",
    "MiniMaxForCausalLM": "minimax.FAMILY",
    "MambaForCausalLM": "mamba.MAMBA", "FalconMambaForCausalLM": "mamba.FALCON_MAMBA",
    "JambaForCausalLM": "mamba.JAMBA",
    "BambaForCausalLM": "mamba2.BAMBA", "Mamba2ForCausalLM": "mamba2.MAMBA2",
    "GraniteMoeHybridForCausalLM": "granite_hybrid.FAMILY", "Lfm2MoeForCausalLM": "lfm2.LFM2_MOE",
    "FalconH1ForCausalLM": "falcon_h1.FAMILY", "NemotronHForCausalLM": "nemotron_h.FAMILY",
    "DeepseekV2ForCausalLM": "deepseek.V2", "DeepseekV3ForCausalLM": "deepseek.V3",
}


class Families(Mapping[str, Family]):
    """The families at places by their architectures."""

    def __init__(self, places: Mapping[str, str]) -> None: self.places = places

    def __getitem__(self, architecture: str) -> Family:
        module, _, name = self.places[architecture].partition(".")
        found: Family = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return found

    def __contains__(self, architecture: object) -> bool:
        return isinstance(architecture, str) and architecture in self.places

    def __iter__(self) -> Iterator[str]: return iter(self.places)

    def __len__(self) -> int: return len(self.places)


FAMILIES = Families(PLACES)

# of architectures that generate no text: decoders without their heads, or with one for classification, and
# encoders with their layers
EMBEDDERS = Families({
    **{name.removesuffix("ForCausalLM") + kind: place for name, place in PLACES.items()
       for kind in ("Model", "ForSequenceClassification")},
    "Gemma3TextModel": PLACES["Gemma3ForCausalLM"],
    "EuroBertModel": "llama.EUROBERT", "EuroBertForMaskedLM": "llama.EUROBERT"})
