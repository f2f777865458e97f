"""The architectures of llama.cpp that are read, by general.architecture."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.gguf.file import GGUFFile

from ..families import mixtral
from . import deepseek, gemma, gpt_oss, granite, llama4, olmo2, phi3, smollm3
from .architecture import USE, Architecture, Metadata

WINDOW = "attention.sliding_window"


def mistral(m: Metadata) -> dict[str, Any]:
    """A llama with a window."""
    if not m.own.get(WINDOW): return {}
    return {"architectures": ["MistralForCausalLM"], "sliding_window": m.own[WINDOW]}


def window(m: Metadata) -> dict[str, Any]:
    """A window in every layer."""
    return {"sliding_window": m.own[WINDOW]} if m.own.get(WINDOW) else {}


def qwen(m: Metadata) -> dict[str, Any]:
    """A window in every layer."""
    if not m.own.get(WINDOW): return {}
    return {"use_sliding_window": True, "max_window_layers": 0, **window(m)}


SLIDES = frozenset({WINDOW})
LLAMA = Architecture("LlamaForCausalLM", settings=mistral, reads=SLIDES, permuted=True)
# what a llama with experts is
MIXTRAL = Architecture("MixtralForCausalLM", mixtral.NAMES, settings=window, reads=SLIDES, permuted=True,
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
    "gemma": gemma.FIRST, "gemma2": gemma.SECOND, "gemma3": gemma.THIRD,
    "gpt-oss": gpt_oss.ARCHITECTURE, "phi3": phi3.ARCHITECTURE, "deepseek2": deepseek.ARCHITECTURE,
    "olmo2": olmo2.ARCHITECTURE, "smollm3": smollm3.ARCHITECTURE, "granite": granite.ARCHITECTURE,
    "llama4": llama4.ARCHITECTURE}


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the architecture of a file. Raises `ModelError` for one that is not read."""
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ModelError(f"{file.path}: general.architecture is {brief(kind)}",
                         f"one of {', '.join(ARCHITECTURES)}", USE)
    return MIXTRAL if kind == "llama" and file.metadata.get("llama.expert_count") else ARCHITECTURES[kind]
