"""Gemma: RMSNorm multiplies by 1 + w before it rounds, the embedding by √hidden. Gemma 2 and 3 have norms
before and after both halves of a layer, sliding windows in some layers, and scores scaled by
query_pre_attn_scalar; Gemma 2 caps scores and logits, Gemma 3 normalises each head's queries and keys, and
rotates layers with a window by another base.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields, activation
from ..layer_config import Names
from .family import Family, layer_types, ropes_by_type, windows

BOTH = Names(attention_post_norm="post_attention_layernorm", feed_forward_norm="pre_feedforward_layernorm",
             feed_forward_post_norm="post_feedforward_layernorm")
DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
SECOND = {**DEFAULTS, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
          "query_pre_attn_scalar": 256, "sliding_window": 4096}
SCALES = frozenset({"final_logit_softcapping", "query_pre_attn_scalar"})
LOCAL, GLOBAL = 10_000.0, 1_000_000.0       # bases of Gemma 3's layers with a window and without


def gemma(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that all of them share."""
    return {"norm_offset": 1.0, "norm_rounds_last": True, "embedding_scale": f.positive("hidden_size") ** 0.5}


def first(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Gemma 1."""
    # published configs say "gelu" and mean the tanh approximation, as in transformers since 4.38
    return {**gemma(f), **({"activation": "gelu_tanh"} if f.get("hidden_act") == "gelu" else {})}


def _second_and_third(f: Fields) -> dict[str, Any]:
    """Returns the fields that Gemma 2 and 3 share."""
    return {**gemma(f), "names": BOTH, "activation": activation(f, "hidden_activation"),
            "attention_scale": f.number("query_pre_attn_scalar") ** -0.5,
            "logit_softcap": f.optional("final_logit_softcapping")}


def second(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Gemma 2."""
    types = layer_types(f, lambda i: i % 2 == 0)
    return {**_second_and_third(f), "windows": windows(f, types),
            "softcap": f.optional("attn_logit_softcapping")}


def third(f: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for Gemma 3."""
    every = f.positive("sliding_window_pattern") if f.get("sliding_window_pattern") is not None else 6
    types, both = layer_types(f, lambda i: (i + 1) % every != 0), f.flag("use_bidirectional_attention")
    # EmbeddingGemma's window is as wide, half on either side
    if both: f = f.within({"sliding_window": f.positive("sliding_window") // 2 + 1})
    return {**_second_and_third(f), "causal": not both, "qk_norm": "head", "windows": windows(f, types),
            "ropes": ropes_by_type(f, types, f.get("rope_theta", GLOBAL),
                                   f.get("rope_local_base_freq", LOCAL))}


GEMMA = Family("GemmaForCausalLM", {**DEFAULTS, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
               settings=first)
GEMMA2 = Family("Gemma2ForCausalLM",
                {**SECOND, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                frozenset({"attn_logit_softcapping", *SCALES}), second)
# the text_config of a multimodal one says only what differs from these
GEMMA3 = Family("Gemma3ForCausalLM",
                {**SECOND, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
                 "num_hidden_layers": 26, "num_attention_heads": 8, "max_position_embeddings": 131_072},
                SCALES | {"use_bidirectional_attention"}, third)
