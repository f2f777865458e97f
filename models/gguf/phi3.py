"""Phi-3 and Phi-4: q | k | v are one tensor, gate | up another, named ffn_up. A part of each head may be
rotated. What `longrope` divides frequencies by are two tensors. llama.cpp computes no window; the file says
what config.json says, and so it is computed here."""
from __future__ import annotations

from typing import Any

from ..families.phi3 import NAMES
from .architecture import Architecture, Metadata

WINDOW, TRAINED = "attention.sliding_window", "rope.scaling.original_context_length"


def settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json."""
    whole = m.positive("embedding_length") // m.positive("attention.head_count")
    dim, rotated = m.get("attention.key_length", whole), m.get("rope.dimension_count")
    made = {"head_dim": dim, "sliding_window": m.get(WINDOW) or None,
            "original_max_position_embeddings": m.get(TRAINED)}
    if rotated not in (None, dim) and isinstance(dim, int) and dim > 0:
        made["partial_rotary_factor"] = m.positive("rope.dimension_count") / dim
    return made


ARCHITECTURE = Architecture("Phi3ForCausalLM", NAMES, reads=frozenset({WINDOW}), settings=settings,
                            whole_heads=False)
