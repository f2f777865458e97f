"""gpt-oss: a window in every other layer. YaRN's bounds are not whole numbers, as its config.json has it and
no metadata say; llama.cpp rounds them."""
from __future__ import annotations

from typing import Any

from ..families.gpt_oss import NAMES
from .architecture import PATTERN, Architecture, Metadata
from .rope import rope_scaling

WINDOW = "attention.sliding_window"


def settings(m: Metadata) -> dict[str, Any]:
    """Returns the settings of config.json."""
    scaling = rope_scaling(m)
    return {"layer_types": m.layer_types(2), "sliding_window": m.get(WINDOW, 128),
            "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False}}


ARCHITECTURE = Architecture("GptOssForCausalLM", NAMES, {"expert_feed_forward_length": "intermediate_size"},
                            frozenset({WINDOW, PATTERN}), settings=settings,
                            renamed={"post_attention_norm": "ffn_norm"})
