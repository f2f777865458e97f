"""The families of models, one small file each: what of `ModelConfig` differs from LLaMA's.

`FAMILIES` has them by the architecture of config.json, `EMBEDDERS` those of embedding models (encoders.py has
encoders). family.py has the record, layers.py what several use.
"""
from . import (
    deepseek,
    eurobert,
    gemma,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi3,
    qwen,
    qwen_moe,
    smollm3,
)
from .family import Family

FAMILIES: dict[str, Family] = {each.architecture: each for each in (
    llama.FAMILY, mistral.FAMILY, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3,
    phi3.FAMILY, olmo.OLMO2, olmo.OLMO3, smollm3.FAMILY, granite.FAMILY,
    gpt_oss.FAMILY, llama4.FAMILY,
    mixtral.FAMILY, qwen_moe.QWEN2, qwen_moe.QWEN3, olmoe.FAMILY,
    deepseek.V2, deepseek.V3)}

# of architectures that generate no text: decoders without their heads, or with one for classification, and
# encoders with their layers
EMBEDDERS: dict[str, Family] = {
    **{name.removesuffix("ForCausalLM") + kind: family for name, family in FAMILIES.items()
       for kind in ("Model", "ForSequenceClassification")},
    "Gemma3TextModel": gemma.GEMMA3,
    "EuroBertModel": eurobert.FAMILY, "EuroBertForMaskedLM": eurobert.FAMILY}
