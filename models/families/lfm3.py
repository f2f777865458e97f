"""LFM3: as LFM2, with windows in some layers, whose rope is their own, a gate of each head, and norms of what
halves of layers give.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad_nv.errors import ModelError

from ..fields import Fields
from .family import FULL, SLIDING, Family, ropes_by_type, windows
from .lfm2 import CONV, lfm2, list_kinds
from .lfm2 import NAMES as LFM2_NAMES

BARE = replace(LFM2_NAMES, output="self_attn.o_proj", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
               spellings=((".self_attn.gate_proj.", ".self_attn.g_proj."),))
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": LOCAL_THETA},
         FULL: {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.5}}


def settings(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig`."""
    if f.get("layer_types") is None:
        f = f.within({"layer_types": [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV
                                      for i in range(f.positive("num_hidden_layers"))]})
    kinds, names = list_kinds(f, (FULL, SLIDING, CONV)), BARE
    bias, gated = f.flag("attention_bias"), f.flag("use_attention_gate")
    if bias and gated:
        raise ModelError(f"{f.name}: attention_bias and use_attention_gate are true",
                         "one of them: gates have no biases", "use a model as it was published")
    if gated: names = replace(names, qkv=(*names.qkv, "self_attn.g_proj"))
    if f.flag("use_sandwich_norm"):
        names = replace(names, attention_post_norm="post_operator_norm",
                        feed_forward_post_norm="post_ffn_norm")
    made = lfm2(f.within({"layer_types": [CONV if kind == CONV else FULL for kind in kinds],
                          "block_ff_dim": None, "block_auto_adjust_ff_dim": False, "tie_embedding": None}))
    epsilon = f.number("norm_eps" if f.get("rms_norm_eps") is None else "rms_norm_eps")
    return {**made, "names": names, "norm_eps": epsilon, "gated_attention": "heads" if gated else False,
            "qkv_bias": bias, "output_bias": bias, "windows": windows(f, kinds),
            "ropes": ropes_by_type(f, kinds, THETA, LOCAL_THETA)}


FAMILY = Family("Lfm3ForCausalLM",
                {"vocab_size": 128_000, "hidden_size": 2048, "intermediate_size": 7680,
                 "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4,
                 "head_dim": 128, "norm_eps": 1e-5, "max_position_embeddings": 128_000, "conv_L_cache": 7,
                 "sliding_window": 256, "tie_word_embeddings": True, "use_sandwich_norm": True,
                 "use_attention_gate": True, "rope_parameters": ROPES}, settings=settings)
