"""OLMo Hybrid: the gated delta rule in three layers of four, with norms of what halves of a layer get;
attention in the others, with norms of what they give, as OLMo 3 has, and mostly without positions.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..fields import Fields
from ..layer_config import LLAMA_NAMES
from ..rope import rope_config, rope_parameters
from .family import FULL, Family
from .olmo import NAMES, second
from .qwen3_next import LINEAR, delta_config, list_kinds

# those of published files, and of transformers
SPELLINGS = ((".attention_layer_norm.", ".input_layernorm."),
             (".feedforward_layer_norm.", ".post_attention_layernorm."))
NORM_EPS = 1e-5     # of the delta rule's results, whatever rms_norm_eps is


def complete(f: Fields) -> Fields:
    """The sizes of heads that a file leaves out, and the layers' kinds."""
    heads = f.positive("num_attention_heads")
    keys, values = (heads if f.get(key) is None else f.positive(key)
                    for key in ("linear_num_key_heads", "linear_num_value_heads"))
    d_k = int(0.75 * f.positive("hidden_size") / keys)
    if f.get("linear_key_head_dim") is not None: d_k = f.positive("linear_key_head_dim")
    made: dict[str, Any] = {"linear_num_key_heads": keys, "linear_num_value_heads": values,
                            "linear_key_head_dim": d_k}
    if f.get("linear_value_head_dim") is None: made["linear_value_head_dim"] = 2 * d_k
    if f.get("layer_types") is None:
        kinds = [FULL if i % 4 == 3 else LINEAR for i in range(f.positive("num_hidden_layers"))]
        made["layer_types"] = kinds if FULL in kinds else [*kinds[:-1], FULL]
    return f.within(made)


def olmo_hybrid(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    own = replace(delta_config(f, False), apart=True, norm_eps=NORM_EPS,
                  most=2.0 if f.flag("linear_allow_neg_eigval") else 1.0)
    given, layers = rope_parameters(f), f.positive("num_hidden_layers")
    # a base that is null is none at all
    rotates = {"rope_theta": f.get("rope_theta", 0.0), **given}["rope_theta"] is not None
    rope = rope_config(f, given, f.positive("head_dim")) if rotates else None
    return {**second(f), "mixers": tuple(own if kind == LINEAR else None for kind in list_kinds(f)),
            "ropes": (rope,) * layers, "names": replace(NAMES, spellings=SPELLINGS),
            "mixer_names": LLAMA_NAMES}


FAMILY = Family("OlmoHybridForCausalLM",
                {"vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008,
                 "num_hidden_layers": 32, "num_attention_heads": 30, "max_position_embeddings": 65_536,
                 "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True}, settings=olmo_hybrid,
                complete=complete)
