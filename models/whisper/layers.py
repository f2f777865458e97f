"""Layers of Whisper's encoder and decoder: attention and feed-forward layers, with norms before them.

Protocol: activations are (B, T, hidden). q|k|v, and of cross-attention k|v, are each stored as one matrix;
keys have no bias in a checkpoint, and zeros here. Numerics are those of transformers: LayerNorm and softmax
in float32, everything else in the parameters' dtype.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.functional import scaled_dot_product_attention

from ..layers import LayerNorm, Linear, activate
from .config import StackConfig, WhisperConfig

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
