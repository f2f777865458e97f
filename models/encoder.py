"""Encoders as one network. `EncoderConfig` has what distinguishes them (families/).

Protocol: `encoder(tokens, batch)` gives the last layer's hidden states (T, hidden) of tokens (T,) of the
sequences in a `PackedBatch`, whose positions are rows of the table, or of the ropes' tables. Numerics are
those of transformers: LayerNorm and softmax in float32, everything else in the parameters' dtype.
"""
from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.runtime.observe.ranges import layer

from .attention import rotate
from .encoder_config import EncoderConfig
from .layers import LayerNorm, Linear, activate
from .paged import AttentionKind, PackedBatch, RopeTables, rope_tables

FARTHEST = 128      # of the buckets of distances: from there on all have the last


def norm(config: EncoderConfig, dtype: DType, device: str | None) -> LayerNorm:
    """A norm of hidden states; some have no bias."""
    return LayerNorm(config.hidden_size, config.norm_eps, dtype, device, "norm" in config.biases)


class EncoderBlock:
    """norm(x + attention(x)), then norm(x + feed_forward(x)); or with norms before, x + attention(norm(x)),
    then x + feed_forward(norm(x))."""

    def __init__(self, config: EncoderConfig, index: int, dtype: DType, device: str | None) -> None:
        def linear(inputs: int, outputs: int, name: str) -> Linear:
            return Linear(inputs, outputs, name in config.biases, dtype, device)
        self.config, self.window = config, config.windows[index]
        self.rope = config.distinct_ropes.index(config.ropes[index]) if config.ropes else None
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        self.qkv, self.output = linear(hidden, 3 * heads, "qkv"), linear(heads, hidden, "output")
        self.up = linear(hidden, config.up_width, "up")
        self.down = linear(config.intermediate_size, hidden, "down")
        self.norm = norm(config, dtype, device)
        self.attention_norm: LayerNorm | None = None    # the first layer's input is normalised already
        if index or not config.pre_norm: self.attention_norm = norm(config, dtype, device)

    def __call__(self, x: Tensor, batch: PackedBatch) -> Tensor:
        before = self.config.pre_norm
        with layer("attention"):
            h = x if self.attention_norm is None or not before else self.attention_norm(x)
            x = x + self.attend(h, batch)
            if self.attention_norm is not None and not before: x = self.attention_norm(x)
        with layer("feed_forward"):
            if before: return (x + self.feed_forward(self.norm(x.contiguous()))).contiguous()
            return self.norm(x + self.feed_forward(x))

    def attend(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """The attention half."""
        c = self.config
        heads = self.qkv(x).contiguous().reshape(-1, 3, c.num_heads, c.head_dim)
        q, k, v = (heads[:, i] for i in range(3))
        if self.rope is not None:
            q, k = (rotate(each, *batch.ropes[self.rope]).contiguous() for each in (q, k))
        how = AttentionKind(self.rope, self.window, c.head_dim ** -0.5, None)
        return self.output(batch.attend(q, k, v, how))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward half."""
        c, made = self.config, self.up(x)
        if not c.gated: return self.down(activate(made, c.activation).contiguous())
        # split: in one kernel each would be computed for all columns of both, as in feed_forward.py
        halves = [half.contiguous() for half in made.contiguous().split([c.intermediate_size] * 2, dim=-1)]
        gate, up = halves[::-1] if c.gate_last else halves
        return self.down((activate(gate, c.activation) * up).contiguous())


class Encoder:
    """The network, for texts of up to `length` tokens. Parameters are allocated, not set:
    `encoder_weights.load` fills them."""

    def __init__(self, config: EncoderConfig, dtype: DType = dtypes.float32, device: str | None = None,
                 length: int | None = None) -> None:
        def table(rows: int, width: int = config.hidden_size) -> Tensor | None:
            return Tensor.empty(rows, width, dtype=dtype, device=device) if rows else None
        self.config, self.dtype, self.device = config, dtype, device
        self.length = config.max_positions if length is None else length
        self.words = Tensor.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.positions, self.types = table(config.position_rows), table(config.token_types)
        self.norm = norm(config, dtype, device)
        self.blocks = [EncoderBlock(config, i, dtype, device) for i in range(config.num_layers)]
        self.final_norm = norm(config, dtype, device) if config.pre_norm else None
        self.distances = table(config.distance_buckets, config.num_heads)

    @cached_property
    def rope_tables(self) -> tuple[RopeTables, ...]:
        """Cosines and sines of each of the config's `distinct_ropes`."""
        return rope_tables(self.config.distinct_ropes, self.length, self.length, self.dtype, self.device)

    @cached_property
    def distance_biases(self) -> Tensor | None:
        """Biases that are added to scores for each distance of a key from its row, float32 (heads, 2 length −
        1)."""
        if self.distances is None: return None
        away = np.arange(1 - self.length, self.length)
        buckets = Tensor(distance_buckets(away, self.config.distance_buckets), device=self.device)
        return F.embedding(self.distances, buckets).float().T.contiguous().realize()

    def batch(self, starts: Tensor, positions: Tensor, longest: int) -> PackedBatch:
        """The batch of a step, with what its attention needs of this network."""
        return PackedBatch.of(starts, positions, longest, self.rope_tables, False, self.distance_biases)

    def __call__(self, tokens: Tensor, batch: PackedBatch, types: Tensor | None = None) -> Tensor:
        """Hidden states (T, hidden) of the last layer. `types` int32 (T,): 1 for tokens of the second of two
        texts; None: all are of type 0."""
        with layer("embedding"):
            x = F.embedding(self.words, tokens)
            if self.positions is not None: x = x + F.embedding(self.positions, batch.positions)
            if self.types is not None:
                x = x + (self.types[0] if types is None else F.embedding(self.types, types))
            x = self.norm(x.contiguous())
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch)
        return x if self.final_norm is None else self.final_norm(x)


def distance_buckets(away: np.ndarray, count: int) -> np.ndarray:
    """The bucket of each distance (key − row), int32, as T5 and MPNet have them: half of `count` for keys
    before, half for keys after. The first half of these has a distance each, the others grow by a factor."""
    half, n = count // 2, np.abs(away)
    exact = half // 2
    far = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact)) / math.log(FARTHEST / exact)
    grown = np.minimum(exact + (far * (half - exact)).astype(np.int32), half - 1)
    return (np.where(n < exact, n, grown) + half * (away > 0)).astype(np.int32)
