"""ModernBERT (arXiv 2412.13663): norms before both halves of a layer, gated feed-forward halves, and windows
in both directions in most layers, which have a rope of their own.

A token of such a layer sees local_attention // 2 tokens on either side.
"""
from __future__ import annotations

from typing import Any

from ..fields import Fields
from .encoder import BERT_DEFAULTS, EncoderFamily, EncoderNames, HeadNames
from .layers import layer_types, ropes_by_type, windows

NAMES = EncoderNames(
    ("model.",), words="embeddings.tok_embeddings", embedding_norm="embeddings.norm", layer="layers.{}",
    qkv=("attn.Wqkv",), output="attn.Wo", attention_norm="attn_norm", up=("mlp.Wi",), down="mlp.Wo",
    norm="mlp_norm", final_norm="final_norm", unread=("head.", "decoder.", "classifier."))
GLOBAL, LOCAL = 160_000.0, 10_000.0     # bases of layers without a window and with one


def modernbert(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig`. Raises `ModelError`."""
    every = f.positive("global_attn_every_n_layers")
    types = layer_types(f, lambda i: i % every != 0)
    f = f.within({"head_dim": f.positive("hidden_size") // f.positive("num_attention_heads"),
                  "sliding_window": f.positive("local_attention") // 2 + 1})
    biased = {"norm_bias": ("norm",), "attention_bias": ("qkv", "output"), "mlp_bias": ("up", "down")}
    return {"windows": windows(f, types), "pre_norm": True, "gated": True,
            "ropes": ropes_by_type(f, types, f.get("global_rope_theta", GLOBAL),
                                   f.get("local_rope_theta", LOCAL)),
            "biases": frozenset(name for key, names in biased.items() if f.flag(key) for name in names)}


FAMILY = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152,
     "hidden_activation": "gelu", "max_position_embeddings": 8192, "type_vocab_size": None, "norm_eps": 1e-5,
     "local_attention": 128, "global_attn_every_n_layers": 3}, NAMES, modernbert,
    {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
    {"rope_scaling": (), "sliding_window": ()}, HeadNames("classifier", "head.dense", "gelu", "head.norm"),
    "classifier_pooling")
FAMILIES = {"ModernBert": FAMILY}
