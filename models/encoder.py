"""Encoders of BERT's family as one network. `EncoderConfig` has what distinguishes them (families/bert.py).

Protocol: `encoder(tokens, batch)` gives the last layer's hidden states (T, hidden) of tokens (T,) of the
sequences in a `PackedBatch`, whose positions are rows of the table. Numerics are those of transformers:
LayerNorm and softmax in float32, everything else in the parameters' dtype.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.functional import embedding
from tinygrad_nv.runtime.observe.ranges import layer

from .encoder_config import EncoderConfig
from .layers import Linear
from .packed import PackedBatch
from .paged import AttentionKind


class LayerNorm:
    """(x − mean) / √(variance + eps) · w + b, in float32 (arXiv 1607.06450)."""

    def __init__(self, config: EncoderConfig, dtype: DType, device: str | None) -> None:
        self.eps = config.norm_eps
        self.weight, self.bias = (Tensor.empty(config.hidden_size, dtype=dtype, device=device)
                                  for _ in range(2))

    def __call__(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f - f.mean(-1, keepdim=True)
        f = f * (f.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (f * self.weight.float() + self.bias.float()).cast(x.dtype).contiguous()


class EncoderBlock:
    """norm(x + attention(x)), then norm(x + down(act(up(x))))."""

    def __init__(self, config: EncoderConfig, dtype: DType, device: str | None) -> None:
        def linear(inputs: int, outputs: int) -> Linear: return Linear(inputs, outputs, True, dtype, device)
        hidden, self.config = config.hidden_size, config
        self.qkv, self.output = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up = linear(hidden, config.intermediate_size)
        self.down = linear(config.intermediate_size, hidden)
        self.attention_norm, self.norm = (LayerNorm(config, dtype, device) for _ in range(2))

    def __call__(self, x: Tensor, batch: PackedBatch) -> Tensor:
        c = self.config
        with layer("attention"):
            heads = self.qkv(x).contiguous().reshape(-1, 3, c.num_heads, c.head_dim)
            how = AttentionKind(None, None, c.head_dim ** -0.5, None)
            attended = batch.attend(heads[:, 0], heads[:, 1], heads[:, 2], how)
            x = self.attention_norm(x + self.output(attended))
        with layer("feed_forward"):
            return self.norm(x + self.down(self.act(self.up(x)).contiguous()))

    def act(self, x: Tensor) -> Tensor:
        """The activation."""
        if self.config.activation == "gelu": return 0.5 * x * (1 + (x * 0.5 ** 0.5).erf())
        return {"gelu_tanh": Tensor.gelu, "silu": Tensor.silu, "relu": Tensor.relu}[self.config.activation](x)


class Encoder:
    """The network. Parameters are allocated, not set: `encoder_weights.load` fills them."""

    def __init__(self, config: EncoderConfig, dtype: DType = dtypes.float32,
                 device: str | None = None) -> None:
        def table(rows: int) -> Tensor:
            return Tensor.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.config, self.dtype, self.device = config, dtype, device
        self.words, self.positions = table(config.vocab_size), table(config.position_rows)
        self.types = table(config.token_types) if config.token_types else None
        self.norm = LayerNorm(config, dtype, device)
        self.blocks = [EncoderBlock(config, dtype, device) for _ in range(config.num_layers)]

    def __call__(self, tokens: Tensor, batch: PackedBatch) -> Tensor:
        """Hidden states (T, hidden) of the last layer."""
        with layer("embedding"):
            x = embedding(self.words, tokens) + embedding(self.positions, batch.positions)
            if self.types is not None: x = x + self.types[0]    # a text alone is of type 0
            x = self.norm(x.contiguous())
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch)
        return x
