"""The encoder, and the decoder over pages of keys and values.

Protocol: `encoder(features)` is the last layer's normalised output (B, positions, hidden) of spectrograms (B,
frames, mels). Both convolutions are matmuls: three neighbouring rows of the input make one, in the order in
which a checkpoint stores the weights of a channel.

A decoder's sequence has two sets of pages. Those of self-attention grow with its tokens, as any decoder's;
those of cross-attention hold keys and values of the encoder's output, which `cross` writes once for each
window. `decoder(tokens, positions, batch)` appends tokens (B·n,) of B sequences of n new ones each, and
attends to both. Every token of a window sees all of its encoder's output: for cross-attention each is a
sequence of its own, whose newest key is the last.

q|k|v, and of cross-attention k|v, are each stored as one matrix; keys have no bias in a checkpoint, and zeros
here. Numerics are those of transformers: LayerNorm and softmax in float32, everything else in the parameters'
dtype.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.functional import embedding, kv_append, paged_attention, scaled_dot_product_attention
from tinygrad_nv.kvcache.store import LayerPages, PagedCache
from tinygrad_nv.runtime.observe.ranges import layer

from ..layers import LayerNorm, Linear, activate, multiply
from .config import StackConfig, WhisperConfig

KERNEL = 3      # rows that a convolution reads


class Convolution:
    """y[t] = Σⱼ x[stride · t + j − 1] W[:, :, j]ᵀ + b with j of 0, 1, 2, and zeros around x; W as a
    checkpoint stores it, (out, in, 3)."""

    def __init__(self, inputs: int, outputs: int, stride: int, dtype: DType, device: str | None) -> None:
        self.stride = stride
        self.weight = Tensor.empty(outputs, inputs, KERNEL, dtype=dtype, device=device)
        self.bias = Tensor.empty(outputs, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        padded = x.pad(((0, 0), (1, 1), (0, 0)))
        shifted = [padded[:, j:j + T:self.stride] for j in range(KERNEL)]
        rows = Tensor.stack(*shifted, dim=-1).reshape(B, T // self.stride, width * KERNEL).contiguous()
        return multiply(rows, self.weight.reshape(-1, width * KERNEL), self.bias)


class SpeechEncoder:
    """Spectrograms to hidden states. Parameters are allocated, not set: `weights.load` fills them."""

    def __init__(self, config: WhisperConfig, dtype: DType, device: str | None) -> None:
        hidden, self.activation = config.hidden_size, config.activation
        self.conv1 = Convolution(config.mels, hidden, 1, dtype, device)
        self.conv2 = Convolution(hidden, hidden, 2, dtype, device)
        self.positions = Tensor.empty(config.positions, hidden, dtype=dtype, device=device)
        self.layers = [EncoderLayer(config, dtype, device) for _ in range(config.encoder.layers)]
        self.norm = norm(hidden, dtype, device)

    def __call__(self, features: Tensor) -> Tensor:
        """(B, positions, hidden) of spectrograms (B, frames, mels) in the parameters' dtype."""
        with layer("convolutions"):
            # exact GELU, whatever the layers have
            x = activate(self.conv1(features), "gelu").contiguous()
            x = (activate(self.conv2(x), "gelu") + self.positions).contiguous()
        for i, each in enumerate(self.layers):
            with layer(f"layers.{i}"): x = each(x)
        return self.norm(x)


@dataclass(frozen=True)
class SpeechBatch:
    """B sequences with `new` tokens each: `table` int32 [B, pages] and `lengths` int32 [B], the new tokens
    included, of self-attention; `cross_table` int32 [B, pages] and `cross_lengths` int32 [B] of
    cross-attention. A sequence of length 0 is padding; one with fewer than `new` tokens has padding in
    front."""
    new: int
    table: Tensor
    lengths: Tensor
    cross_table: Tensor
    cross_lengths: Tensor


class DecoderLayer:
    """x + self_attention(norm(x)), x + cross_attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: WhisperConfig, dtype: DType, device: str | None) -> None:
        hidden, self.heads = config.hidden_size, config.decoder.heads
        def linear(outputs: int) -> Linear: return Linear(hidden, outputs, True, dtype, device)
        self.qkv, self.output = linear(3 * hidden), linear(hidden)
        self.cross_q, self.cross_kv, self.cross_output = linear(hidden), linear(2 * hidden), linear(hidden)
        self.attention_norm, self.cross_norm, self.norm = (norm(hidden, dtype, device) for _ in range(3))
        self.feed_forward = FeedForward(config, config.decoder, dtype, device)

    def __call__(self, x: Tensor, batch: SpeechBatch, own: LayerPages, cross: LayerPages) -> Tensor:
        x = (x + self.output(self.attend(self.attention_norm(x), batch, own))).contiguous()
        x = (x + self.cross_output(self.cross_attend(self.cross_norm(x), batch, cross))).contiguous()
        return (x + self.feed_forward(self.norm(x))).contiguous()

    def attend(self, x: Tensor, batch: SpeechBatch, pages: LayerPages) -> Tensor:
        """Self-attention: appends keys and values of x (1, T, hidden) to the pages."""
        hidden = int(x.shape[-1])
        heads = self.qkv(x).contiguous().reshape(-1, batch.new, 3, self.heads, hidden // self.heads)
        q, k, v = (heads[:, :, i] for i in range(3))
        assert pages.values is not None
        # new Tensors over the same storage, so that reads depend on the appends
        keys, values = kv_append(Tensor(pages.keys.uop), Tensor(pages.values.uop), k, v, batch.table,
                                 batch.lengths)
        made = paged_attention(q, keys, values, batch.table, batch.lengths)
        return made.reshape(1, -1, hidden).contiguous()

    def cross_attend(self, x: Tensor, batch: SpeechBatch, pages: LayerPages) -> Tensor:
        """Cross-attention of x (1, T, hidden) over the encoder's output."""
        hidden = int(x.shape[-1])
        assert pages.values is not None
        q = self.cross_q(x).contiguous().reshape(-1, 1, self.heads, hidden // self.heads)
        made = paged_attention(q, pages.keys, pages.values, batch.cross_table, batch.cross_lengths)
        return made.reshape(1, -1, hidden).contiguous()

    def cross(self, encoded: Tensor, table: Tensor, lengths: Tensor, pages: LayerPages) -> list[Tensor]:
        """Keys and values of encoded (B, positions, hidden) into the pages: what is to be realized."""
        B, T, hidden = encoded.shape
        heads = self.cross_kv(encoded).contiguous().reshape(B, T, 2, self.heads, hidden // self.heads)
        assert pages.values is not None
        k, v = (heads[:, :, i] for i in range(2))
        return list(kv_append(Tensor(pages.keys.uop), Tensor(pages.values.uop), k, v, table, lengths))


class SpeechDecoder:
    """Tokens to logits. Parameters are allocated, not set: `weights.load` fills them."""

    def __init__(self, config: WhisperConfig, dtype: DType, device: str | None) -> None:
        def table(rows: int) -> Tensor:
            return Tensor.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.words, self.positions = table(config.vocab_size), table(config.max_tokens)
        self.head = self.words if config.tied else table(config.vocab_size)
        self.layers = [DecoderLayer(config, dtype, device) for _ in range(config.decoder.layers)]
        self.norm = norm(config.hidden_size, dtype, device)

    def cross(self, encoded: Tensor, table: Tensor, lengths: Tensor, pages: PagedCache) -> list[Tensor]:
        """Keys and values of windows (B, positions, hidden) into the pages of `table`, int32 [B, pages], for
        cross-attention: what is to be realized. `lengths` int32 [B]: positions, or 0 of padding."""
        return [tensor for each, own in zip(self.layers, pages.layers, strict=True)
                for tensor in each.cross(encoded, table, lengths, own)]

    def __call__(self, tokens: Tensor, positions: Tensor, batch: SpeechBatch, own: PagedCache,
                 cross: PagedCache, rows: Tensor | None = None) -> Tensor:
        """float32 logits (R, vocab) of the tokens `rows`, int32 (R,), or of all, for tokens and their
        positions, int32 (T,) both. Appends to the pages of `own`; reads those of `cross`."""
        with layer("embedding"):
            x = embedding(self.words, tokens) + embedding(self.positions, positions)
            x = x.unsqueeze(0).contiguous()
        for i, each in enumerate(self.layers):
            with layer(f"layers.{i}"): x = each(x, batch, own.layers[i], cross.layers[i])
        with layer("head"):
            if rows is not None: x = embedding(x[0], rows).unsqueeze(0).contiguous()
            return multiply(self.norm(x), self.head)[0].float()


class Whisper:
    """The network."""

    def __init__(self, config: WhisperConfig, dtype: DType, device: str | None = None) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.encoder = SpeechEncoder(config, dtype, device)
        self.decoder = SpeechDecoder(config, dtype, device)


EPS = 1e-5
FLOAT16_MOST = 64504.0     # transformers' bound: 1000 below the largest


def norm(hidden: int, dtype: DType, device: str | None) -> LayerNorm:
    """A norm of hidden states."""
    return LayerNorm(hidden, EPS, dtype, device)


class FeedForward:
    """activation(x W₁ᵀ + b₁) W₂ᵀ + b₂."""

    def __init__(self, config: WhisperConfig, stack: StackConfig, dtype: DType, device: str | None) -> None:
        self.activation = config.activation
        self.up = Linear(config.hidden_size, stack.ffn_width, True, dtype, device)
        self.down = Linear(stack.ffn_width, config.hidden_size, True, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(activate(self.up(x), self.activation).contiguous())


class EncoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); every position attends to all."""

    def __init__(self, config: WhisperConfig, dtype: DType, device: str | None) -> None:
        hidden, self.heads = config.hidden_size, config.encoder.heads
        self.qkv = Linear(hidden, 3 * hidden, True, dtype, device)
        self.output = Linear(hidden, hidden, True, dtype, device)
        self.attention_norm, self.norm = (norm(hidden, dtype, device) for _ in range(2))
        self.feed_forward = FeedForward(config, config.encoder, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        x = (x + self.attend(self.attention_norm(x))).contiguous()
        x = x + self.feed_forward(self.norm(x))
        # large models come near to what float16 holds
        return (x.clamp(-FLOAT16_MOST, FLOAT16_MOST) if x.dtype == dtypes.float16 else x).contiguous()

    def attend(self, x: Tensor) -> Tensor:
        """The attention half."""
        B, T, hidden = x.shape
        heads = self.qkv(x).contiguous().reshape(B, T, 3, self.heads, hidden // self.heads)
        q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
        made = scaled_dot_product_attention(q, k, v)
        return self.output(made.transpose(1, 2).reshape(B, T, hidden).contiguous())
