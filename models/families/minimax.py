"""MiniMax-01 (arXiv 2501.08313): lightning attention in most layers, attention with rope in the others,
mixtures of experts in all. Halves of layers add what they make to their normalised input.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..layer_config import COUNTS, NormedSums
from ..mixers.config import LightningConfig
from .family import FULL, Family
from .mistral import MIXTRAL, mixtral
from .mistral import NAMES as MIXTRAL_NAMES
from .qwen3_next import LINEAR, list_kinds

# computed of the number of a layer
CONSTANTS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
NAMES = replace(MIXTRAL_NAMES, unread_ends=tuple(f".self_attn.{name}" for name in CONSTANTS))
PARTS = ("full_attn", "linear_attn", "mlp")


def minimax(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    layers, heads, size = (f.positive(key) for key in ("num_hidden_layers", "num_attention_heads",
                                                       "head_dim"))
    if f.get("rotary_dim") not in (None, size):    # transformers rotates whole heads
        raise ModelError(f"{f.name}: rotary_dim is {brief(f.get('rotary_dim'))}, which is not implemented",
                         f"whole heads of {size} elements", "use a model of a supported family")
    if f.get("layer_types") is None:
        f = f.within({"layer_types": [LINEAR if i % 2 else FULL for i in range(layers)]})
    if LINEAR not in (kinds := list_kinds(f)):
        raise ModelError(f"{f.name}: layer_types is {brief(kinds)}", f"{LINEAR} in some layer",
                         "use a model as it was published")
    sums = [(f.number(f"{part}_alpha_factor", zero=True), f.number(f"{part}_beta_factor", zero=True))
            for part in PARTS]
    # later layers remember more
    mixers = tuple(LightningConfig(heads, size, 1 - i / (layers - 1 + 1e-5) + 1e-5) if kind == LINEAR
                   else None for i, kind in enumerate(kinds))
    return {**mixtral(f), "names": NAMES, "mixers": mixers, "normed_sums": NormedSums(*sums)}


FAMILY = Family("MiniMaxForCausalLM",
                {**MIXTRAL.defaults, **{f"{part}_{kind}_factor": 1 for part in PARTS
                                        for kind in ("alpha", "beta")}}, frozenset(COUNTS), minimax)
