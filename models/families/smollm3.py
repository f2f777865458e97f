"""SmolLM 3: every fourth layer rotates nothing."""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..rope import rope_config, rope_parameters
from .family import Family, has_rope, layer_types, windows


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    rotated = has_rope(f)
    used = f.flag("use_sliding_window") and f.get("sliding_window") is not None
    types = layer_types(f, lambda i: used and not rotated[i])
    rope = rope_config(f, rope_parameters(f), f.positive("head_dim"))
    return {"mlp_bias": f.flag("mlp_bias"), "windows": windows(f, types),
            "ropes": tuple(rope if each else None for each in rotated)}


FAMILY = Family("SmolLM3ForCausalLM",
                {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "rope_theta": 2e6,
                 "tie_word_embeddings": True}, settings=settings)
