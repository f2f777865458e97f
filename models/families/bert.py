"""Encoders like BERT (arXiv 1810.04805): BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and MPNet.
Post-norm layers, attention to all tokens, learned positions.

RoBERTa's positions begin after the padding token's id, which is a row of the table, too; a padding token in
a text has that row. DistilBERT has fields and tensors of its own names, and no token types. MPNet (arXiv
2004.09297) is RoBERTa without token types, whose scores have a bias for each bucket of distances.
"""
from __future__ import annotations

from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from .encoder import BERT_DEFAULTS, ROBERTA_HEAD, EncoderFamily, EncoderNames, HeadNames

DISTILBERT_NAMES = EncoderNames(
    ("distilbert.",), layer="transformer.layer.{}",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"), output="attention.out_lin",
    attention_norm="sa_layer_norm", up=("ffn.lin1",), down="ffn.lin2", norm="output_layer_norm")
MPNET_NAMES = EncoderNames(
    ("mpnet.",), qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), output="attention.attn.o",
    attention_norm="attention.LayerNorm", distances="encoder.relative_attention_bias")
BUCKETS = 32    # of distances; transformers' MPNet reads no other number


def roberta(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig`. Raises `ModelError`."""
    return after_padding(f, f.get("pad_token_id"))


def mpnet(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig`, whatever pad_token_id says: transformers' padding token is 1.
    Raises `ModelError`."""
    return {**after_padding(f, 1), "distance_buckets": BUCKETS}


def after_padding(f: Fields, pad: Any) -> dict[str, Any]:
    """Positions that begin after the row of a padding token. Raises `ModelError`."""
    rows = f.positive("max_position_embeddings")
    if not isinstance(pad, int) or isinstance(pad, bool) or not 0 <= pad < rows - 2:
        raise ModelError(f"{f.name}: pad_token_id is {brief(pad)}", f"a token id up to {rows - 3}",
                         "correct the file, or download it again")
    return {"first_position": pad + 1, "padding_id": pad, "max_positions": rows - pad - 1}


BERT = EncoderFamily(BERT_DEFAULTS)
ROBERTA = EncoderFamily({**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
                        EncoderNames(("roberta.",)), roberta, head=ROBERTA_HEAD)
DISTILBERT = EncoderFamily(
    {"vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
     "max_position_embeddings": 512, "type_vocab_size": None, "layer_norm_eps": 1e-12}, DISTILBERT_NAMES,
    renamed={"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
             "num_attention_heads": "n_heads", "hidden_act": "activation"},
    head=HeadNames("classifier", "pre_classifier", "relu"))
MPNET = EncoderFamily({**BERT_DEFAULTS, "vocab_size": 30527, "type_vocab_size": None}, MPNET_NAMES, mpnet,
                      only={"relative_attention_num_buckets": (BUCKETS,)}, head=ROBERTA_HEAD)
FAMILIES = {"Bert": BERT, "Roberta": ROBERTA, "XLMRoberta": ROBERTA, "Camembert": ROBERTA,
            "DistilBert": DISTILBERT, "MPNet": MPNET}
