"""Granite 4: Mamba-2 in most layers, attention without positions (or with rope) in the others; a feed-forward
in all, beside a mixture of experts where there is one. The four factors of Granite 3.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..layer_config import COUNTS, Names, moe_config
from .family import FULL, Family
from .granite import FACTORS, settings
from .mamba2 import SIZES, mamba_config
from .qwen3_next import LINEAR, list_kinds

MLP, MIXTURE = "shared_mlp", "block_sparse_moe"
TENSORS = f"{MIXTURE}.input_linear.weight", f"{MIXTURE}.output_linear.weight"
NAMES = Names(gate_up=(f"{MLP}.input_linear",), down=f"{MLP}.output_linear", router=f"{MIXTURE}.router.layer",
              expert=f"{MIXTURE}.experts.{{}}", fused="rows", fused_tensors=TENSORS, shared_expert=MLP,
              shared_matrices=("input_linear", "output_linear"))


def complete(f: Fields) -> Fields:
    """The layers' kinds by transformers' names of today: older files have "mamba" and "attention"."""
    key = "layer_types" if f.get("layer_types") is not None else "layers_block_type"
    if not isinstance(given := f.get(key), list): return f
    older = {"mamba": LINEAR, "attention": FULL}
    return f.within({"layer_types": [older.get(str(each), each) for each in given]})


def granite_hybrid(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    own, layers = mamba_config(f), f.positive("num_hidden_layers")
    shared = f.positive("shared_intermediate_size")
    made = {**settings(f), "names": NAMES, "mlp_bias": False,
            "mixers": tuple(None if kind == FULL else own for kind in list_kinds(f))}
    if f.get("position_embedding_type") != "rope": made["ropes"] = (None,) * layers
    if not f.get("num_local_experts"): return {**made, "intermediate_size": shared}
    return {**made, "moe": moe_config(f, 8, "intermediate_size", (True,) * layers, shared)}


FAMILY = Family("GraniteMoeHybridForCausalLM",
                {**SIZES, **dict.fromkeys(FACTORS, 1.0), "num_local_experts": 8, "num_experts_per_tok": 2,
                 "shared_intermediate_size": 1024, "full_attention_interval": 1 << 20},
                frozenset({*FACTORS, *COUNTS}), granite_hybrid, complete=complete)
