"""config.json of an encoder, checked, as one frozen `EncoderConfig`.

Protocol: `read_encoder_config(directory)` is None for an architecture that is no encoder of families/bert.py.
A field that changes what is computed and is not implemented raises `ModelError` by name.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ModelError

from .config import config_dtype, read_json
from .families.bert import DISTILBERT, DISTILBERT_FIELDS, ENCODERS, EncoderNames
from .fields import ACTIVATIONS, Fields

# and the values that change nothing
REFUSED = {"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,),
           "quantization_config": (), "embedding_size": ()}
KINDS = {**ACTIVATIONS, "relu": "relu"}


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder of BERT's family. `max_positions` are tokens of a text; position 0 has row `first_position`
    of the table. `padding_id`: a token that has the row before, and is not counted; None for none.
    `token_types` is 0 for a model without them."""
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    token_types: int
    norm_eps: float
    activation: str
    names: EncoderNames
    first_position: int = 0
    padding_id: int | None = None
    dtype: str | None = None
    quantization: None = None       # none is implemented

    @property
    def head_dim(self) -> int: return self.hidden_size // self.num_heads

    @property
    def position_rows(self) -> int:
        """Of the table of positions."""
        return self.max_positions + self.first_position

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        h, wide = self.hidden_size, self.intermediate_size
        layer = 4 * h * (h + 1) + 2 * h * wide + wide + h + 4 * h
        return self.num_layers * layer + h * (self.vocab_size + self.position_rows + self.token_types + 2)


def read_encoder_config(directory: Path) -> EncoderConfig | None:
    """The configuration of the encoder in `directory`, None where it holds something else. Raises
    `ModelError`."""
    path = directory / "config.json"
    if not os.path.isfile(path): return None
    data = read_json(path)
    listed = data.get("architectures")
    known = [each for each in listed if str(each) in ENCODERS] if isinstance(listed, list) else []
    return parse_encoder_config(data, known[0], str(path)) if known else None


def parse_encoder_config(data: dict[str, Any], architecture: str, name: str) -> EncoderConfig:
    """`read_encoder_config` of an object already read."""
    family = ENCODERS[architecture]
    raw = {**family.defaults, **{key: value for key, value in data.items() if value is not None}}
    if family is DISTILBERT: raw |= {theirs: raw[own] for theirs, own in DISTILBERT_FIELDS.items()}
    for key, allowed in REFUSED.items():
        if key in raw and raw[key] not in allowed:
            raise ModelError(f"{name}: {key} is {raw[key]!r}, which is not implemented for {architecture}",
                             "a model without it", "use a model of a supported family as it was published")
    f = Fields(raw, name)
    hidden, heads = f.positive("hidden_size"), f.positive("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                         "a multiple", "correct the file, or download it again")
    if (act := raw["hidden_act"]) not in KINDS:
        raise ModelError(f"{name}: hidden_act {act!r} is not supported", f"one of: {', '.join(KINDS)}")
    common = {"max_positions": f.positive("max_position_embeddings"),
              "token_types": f.positive("type_vocab_size") if raw["type_vocab_size"] else 0}
    return EncoderConfig(
        architecture=architecture, vocab_size=f.positive("vocab_size"), hidden_size=hidden,
        intermediate_size=f.positive("intermediate_size"), num_layers=f.positive("num_hidden_layers"),
        num_heads=heads, norm_eps=f.number("layer_norm_eps"), activation=KINDS[act], names=family.names,
        dtype=config_dtype(raw, name), **{**common, **family.settings(f)})
