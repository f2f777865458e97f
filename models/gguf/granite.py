"""Granite 3: its four factors are metadata. Without attention.scale scores are divided by √D."""
from __future__ import annotations

from typing import Any

from .architecture import Architecture, Metadata

UNROTATED = "rope.scaling.finetuned"    # false: no layer has rope


def settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json."""
    if not m.get(UNROTATED, True): raise m.refusal(UNROTATED, "true: layers with rope")
    dim = m.head_dim
    if m.get("attention.scale") or not isinstance(dim, int) or dim < 1: return {}
    return {"attention_multiplier": dim ** -0.5}


ARCHITECTURE = Architecture("GraniteForCausalLM", settings=settings, permuted=True)
