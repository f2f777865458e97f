"""Encoders like BERT (arXiv 1810.04805): BERT, RoBERTa, XLM-RoBERTa and DistilBERT. Post-norm layers,
attention to all tokens, learned positions.

RoBERTa's positions begin after the padding token's id, which is a row of the table, too; a padding token in
a text has that row. DistilBERT has fields and tensors of its own names, and no token types.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.errors import ModelError

from ..fields import Fields


@dataclass(frozen=True)
class EncoderNames:
    """Hugging Face names: `prefixes` of a whole model's tensors, of which some may be there; of a layer i
    those after `layer`. `unread` tensors are not the encoder's: heads, and the pooler that no pooling here
    uses."""
    prefixes: tuple[str, ...] = ("bert.",)
    layer: str = "encoder.layer.{}"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    unread: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids")


@dataclass(frozen=True)
class EncoderFamily:
    """`defaults` are what transformers' config class fills in; `settings(f)` are fields of `EncoderConfig`
    that differ from BERT's. It raises `ModelError`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: EncoderNames = EncoderNames()
    settings: Callable[[Fields], dict[str, Any]] = lambda f: {}


BERT_DEFAULTS = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                 "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
                 "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}
DISTILBERT_NAMES = EncoderNames(
    ("distilbert.",), "transformer.layer.{}", ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm")
# its fields by BERT's names
DISTILBERT_FIELDS = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
                     "num_attention_heads": "n_heads", "hidden_act": "activation"}


def roberta(f: Fields) -> dict[str, Any]:
    """Of `EncoderConfig`. Raises `ModelError`."""
    pad, rows = f.get("pad_token_id"), f.positive("max_position_embeddings")
    if not isinstance(pad, int) or isinstance(pad, bool) or not 0 <= pad < rows - 2:
        raise ModelError(f"{f.name}: pad_token_id is {pad!r}", f"a token id up to {rows - 3}",
                         "correct the file, or download it again")
    return {"first_position": pad + 1, "padding_id": pad, "max_positions": rows - pad - 1}


BERT = EncoderFamily(BERT_DEFAULTS)
ROBERTA = EncoderFamily({**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
                        EncoderNames(("roberta.",)), roberta)
DISTILBERT = EncoderFamily({"vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072,
                            "activation": "gelu", "max_position_embeddings": 512, "type_vocab_size": None,
                            "layer_norm_eps": 1e-12}, DISTILBERT_NAMES)

ENCODERS: dict[str, EncoderFamily] = {
    f"{name}{kind}": family for name, family in (
        ("Bert", BERT), ("Roberta", ROBERTA), ("XLMRoberta", ROBERTA), ("DistilBert", DISTILBERT))
    for kind in ("Model", "ForMaskedLM")}
