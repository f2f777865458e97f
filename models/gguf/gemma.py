"""Gemma, Gemma 2 and Gemma 3: 1 is added to norms. By what scores are divided no metadata say: it is √D, and
in the largest models √(hidden / heads), which llama.cpp tells by the number of layers."""
from __future__ import annotations

from typing import Any

from ..families.gemma import BOTH
from .architecture import PATTERN, Architecture, Metadata

WINDOW, LOCAL_BASE = "attention.sliding_window", "rope.freq_base_swa"
LARGEST = {"gemma2": 46, "gemma3": 62}      # layers
LOCAL = 10_000.0        # base of Gemma 3's layers with a window, where the file says none


def second_and_third(m: Metadata) -> dict[str, Any]:
    """Returns the settings that Gemma 2 and 3 share."""
    whole = m.positive("block_count") == LARGEST[m.kind]
    scalar = m.positive("embedding_length") // m.positive("attention.head_count") if whole else m.head_dim
    return {"query_pre_attn_scalar": scalar, "rope_theta": m.get("rope.freq_base", LOCAL),
            "attn_logit_softcapping": m.get("attn_logit_softcapping"),
            "final_logit_softcapping": m.get("final_logit_softcapping")}


def second(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json for Gemma 2."""
    return {**second_and_third(m), "sliding_window": m.get(WINDOW, 4096), "layer_types": m.layer_types(2)}


def third(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json for Gemma 3. Without a window all layers are global."""
    types = m.layer_types(6) if m.get(WINDOW) else m.layer_types(1)
    return {**second_and_third(m), "sliding_window": m.get(WINDOW), "layer_types": types,
            "rope_local_base_freq": m.get(LOCAL_BASE, LOCAL)}


FIRST = Architecture("GemmaForCausalLM", norm_offset=1.0)
SECOND = Architecture("Gemma2ForCausalLM", BOTH, reads=frozenset({WINDOW, PATTERN}), settings=second,
                      norm_offset=1.0)
THIRD = Architecture("Gemma3ForCausalLM", BOTH, reads=frozenset({WINDOW, PATTERN, LOCAL_BASE}),
                     settings=third, norm_offset=1.0)
