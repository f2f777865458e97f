"""Records of families of encoders: one for each architecture of config.json."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fields import Fields


@dataclass(frozen=True)
class EncoderNames:
    """Hugging Face names: `prefixes` of a whole model's tensors, of which some may be there; of a layer i
    those after `layer`. `qkv` and `up` are stacked in a network: one name, or one for each of queries, keys
    and values, and of gate and up. Empty names are of tensors that a family does not have. `unread` tensors
    are not the encoder's: heads, and the pooler that no pooling here uses."""
    prefixes: tuple[str, ...] = ("bert.",)
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    final_norm: str = ""
    distances: str = ""
    unread: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids",
                               "classifier.", "pre_classifier.")


@dataclass(frozen=True)
class HeadNames:
    """Names of a head for sequence classification (classifier.py), without the model's prefix: `out` of the
    matrix that makes logits, `dense` and `norm` of the layer before it, if there is one, with its activation,
    which config.json may have in `activation_field`."""
    out: str
    dense: str = ""
    activation: str = "tanh"
    norm: str = ""
    activation_field: str = "classifier_activation"


BERT_HEAD = HeadNames("classifier", "pooler.dense")
ROBERTA_HEAD = HeadNames("classifier.out_proj", "classifier.dense")
DECODER_HEAD = HeadNames("score")


@dataclass(frozen=True)
class EncoderFamily:
    """`defaults` are what transformers' config class fills in; `renamed` has BERT's names of fields that it
    calls otherwise. `only` are fields that change what is computed, with the values that are computed;
    `settings(f)` are fields of `EncoderConfig` that differ from BERT's. It raises `ModelError`. `head` is
    that of models for sequence classification, which pool the first token (CLS) unless `pooling_field` of
    config.json names another."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: EncoderNames = EncoderNames()
    settings: Callable[[Fields], dict[str, Any]] = lambda f: {}
    renamed: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    head: HeadNames = BERT_HEAD
    pooling_field: str = ""


BERT_DEFAULTS = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                 "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
                 "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}
