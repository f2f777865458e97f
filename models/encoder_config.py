"""config.json of an encoder, checked, as one frozen `EncoderConfig`.

Protocol: `read_encoder_config(directory)` is None for an architecture that is none of families/encoder.py.
A field that changes what is computed and is not implemented raises `ModelError` by name.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from .config import config_dtype, read_json
from .families.encoder import ENCODERS, EncoderNames
from .fields import ACTIVATIONS, Fields
from .model_types import architectures_of
from .rope import RopeConfig, distinct

# and the values that change nothing
REFUSED = {"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,),
           "quantization_config": (), "embedding_size": ()}
KINDS = {**ACTIVATIONS, "relu": "relu"}
ALL_BIASES = frozenset({"qkv", "output", "up", "down", "norm"})


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder. `max_positions` are tokens of a text; position 0 has row `first_position` of the table.
    `padding_id`: a token that has the row before, and is not counted; None for none. `token_types` is 0 for a
    model without them. With `ropes`, one for each layer, there is no table of positions. A layer with a
    window attends to fewer tokens than that on either side, others to all. With `pre_norm` norms are before
    both halves of a layer, except for the first attention, and after the last layer. `gated` feed-forward
    halves multiply act(gate) with up; gate is stacked above up, with `gate_last` below. `biases` are of qkv,
    output, up, down and norm. `distance_buckets`: scores have biases by distance, of so many rows."""
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
    head_dim: int
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...] = ()
    pre_norm: bool = False
    gated: bool = False
    gate_last: bool = False
    biases: frozenset[str] = ALL_BIASES
    distance_buckets: int = 0
    first_position: int = 0
    padding_id: int | None = None
    dtype: str | None = None
    quantization: None = None       # none is implemented

    @property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes of all layers, each once."""
        return distinct(self.ropes)

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions."""
        return 0 if self.ropes else self.max_positions + self.first_position

    @property
    def up_width(self) -> int:
        """Outputs of a feed-forward half's first matrix."""
        return self.intermediate_size * (1 + self.gated)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        h, heads = self.hidden_size, self.num_heads * self.head_dim
        layer = 4 * h * heads + h * (self.up_width + self.intermediate_size)
        sizes = {"qkv": 3 * heads, "output": h, "up": self.up_width, "down": h, "norm": 2 * h}
        layer += 2 * h + sum(size for name, size in sizes.items() if name in self.biases)
        rows = self.vocab_size + self.position_rows + self.token_types
        norm = h * (1 + ("norm" in self.biases))    # with `pre_norm` the last one is the first layer's
        return self.num_layers * layer + h * rows + norm + self.distance_buckets * self.num_heads


def read_encoder_config(directory: Path) -> EncoderConfig | None:
    """The configuration of the encoder in `directory`, None where it holds something else. Raises
    `ModelError`."""
    path = directory / "config.json"
    if not os.path.isfile(path): return None
    data = read_json(path)
    known = [each for each in architectures_of(data) if isinstance(each, str) and each in ENCODERS]
    return parse_encoder_config(data, known[0], str(path)) if known else None


def parse_encoder_config(data: dict[str, Any], architecture: str, name: str) -> EncoderConfig:
    """`read_encoder_config` of an object already read."""
    family = ENCODERS[architecture]
    raw = {**family.defaults, **{key: value for key, value in data.items() if value is not None}}
    raw |= {theirs: raw[own] for theirs, own in family.renamed.items() if own in raw}
    for key, allowed in {**REFUSED, **family.only}.items():
        if key in raw and raw[key] not in allowed:
            raise ModelError(f"{name}: {key} is {brief(raw[key])}, which is not implemented for "
                             f"{architecture}", "a model without it",
                             "use a model of a supported family as it was published")
    f = Fields(raw, name)
    hidden, heads, layers = map(f.positive, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    settings = family.settings(f)
    if "head_dim" not in settings and hidden % heads:
        raise ModelError(f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                         "a multiple", "correct the file, or download it again")
    common = {"head_dim": hidden // heads, "windows": (None,) * layers,
              "max_positions": f.positive("max_position_embeddings"),
              "token_types": f.positive("type_vocab_size") if raw["type_vocab_size"] else 0}
    return EncoderConfig(
        architecture=architecture, vocab_size=f.positive("vocab_size"), hidden_size=hidden,
        intermediate_size=f.positive("intermediate_size"), num_layers=layers, num_heads=heads,
        norm_eps=f.number("layer_norm_eps"), activation=KINDS[f.one_of("hidden_act", KINDS)],
        names=family.names, dtype=config_dtype(raw, name), **{**common, **settings})
