"""OLMo 2, and OLMo 3, which is one with a window in three layers of four, whose rope is not scaled."""
from __future__ import annotations

from typing import Any

from ..families.layers import FULL, SLIDING
from ..families.olmo import NAMES
from .architecture import PATTERN, Architecture, Metadata

WINDOW, LOCAL_BASE = "attention.sliding_window", "rope.freq_base_swa"


def settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json."""
    if not m.get(WINDOW): return {}
    base = m.get("rope.freq_base", 10_000.0)
    ropes = {FULL: {"rope_theta": base}, SLIDING: {"rope_theta": m.get(LOCAL_BASE, base)}}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": m.get(WINDOW),
            "layer_types": m.layer_types(4), "rope_parameters": ropes}


ARCHITECTURE = Architecture("Olmo2ForCausalLM", NAMES, reads=frozenset({WINDOW, PATTERN, LOCAL_BASE}),
                            settings=settings)
