"""Granite 3: LLaMA with four factors: of the embedding, of scores, of what a layer adds, of logits."""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from .family import Family

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    embedding, scale, residual, logits = (f.number(name) for name in FACTORS)
    return {"mlp_bias": f.flag("mlp_bias"), "embedding_scale": embedding, "attention_scale": scale,
            "residual_scale": residual, "logit_divisor": logits}


FAMILY = Family("GraniteForCausalLM", dict.fromkeys(FACTORS, 1.0), frozenset(FACTORS), settings)
