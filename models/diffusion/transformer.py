"""Transformers over the pixels of an image, with cross-attention to a text.

Protocol: x (B, H, W, C) is normalised by groups, projected, taken as H · W tokens through blocks of
self-attention, cross-attention to `context` (B, T, width) and a GEGLU feed-forward half, projected back and
added to x.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.functional import gate_up, scaled_dot_product_attention

from ..layers import LayerNorm
from .layers import GatedLinear, GroupNorm, Linear

NORM_EPS = 1e-5             # of a block's norms
GROUP_NORM_EPS = 1e-6       # of the norm before the blocks


class SelfAttention:
    """Attention among the pixels of an image; q, k and v have biases in autoencoders."""
    STORED: ClassVar = {"qkv": ("to_q", "to_k", "to_v"), "out": ("to_out.0",)}

    def __init__(self, width: int, heads: int, dtype: DType, device: str | None, biased: bool) -> None:
        self.heads = heads
        self.qkv = Linear(width, 3 * width, dtype, device, biased)
        self.out = Linear(width, width, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        heads = self.qkv(x).contiguous().reshape(B, T, 3, self.heads, width // self.heads)
        q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
        return self.out(_join_heads(scaled_dot_product_attention(q, k, v)))


class CrossAttention:
    """Attention of pixels to the tokens of a text."""
    STORED: ClassVar = {"to_kv": ("to_k", "to_v"), "out": ("to_out.0",)}

    def __init__(self, width: int, heads: int, context: int, dtype: DType, device: str | None) -> None:
        self.heads = heads
        self.to_q = Linear(width, width, dtype, device, bias=False)
        self.to_kv = Linear(context, 2 * width, dtype, device, bias=False)
        self.out = Linear(width, width, dtype, device)

    def __call__(self, x: Tensor, context: Tensor) -> Tensor:
        B, T, width = x.shape
        q = self.to_q(x).contiguous().reshape(B, T, self.heads, width // self.heads).transpose(1, 2)
        heads = self.to_kv(context).contiguous().reshape(B, -1, 2, self.heads, width // self.heads)
        k, v = (heads[:, :, i].transpose(1, 2) for i in range(2))
        return self.out(_join_heads(scaled_dot_product_attention(q, k, v)))


def _join_heads(x: Tensor) -> Tensor:
    """Heads (B, H, T, D) side by side: (B, T, H D)."""
    return x.transpose(1, 2).flatten(2).contiguous()


class FeedForward:
    """GEGLU (arXiv 2002.05202), four times as wide."""
    STORED: ClassVar = {"proj": ("net.0.proj",), "down": ("net.2",)}

    def __init__(self, width: int, dtype: DType, device: str | None) -> None:
        self.proj = GatedLinear(width, 8 * width, dtype, device)
        self.down = Linear(4 * width, width, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gate_up(self.proj(x).contiguous(), "gelu"))


class TransformerBlock:
    """Self-attention, cross-attention and the feed-forward half, each added to its input."""

    def __init__(self, width: int, heads: int, context: int, dtype: DType, device: str | None) -> None:
        self.norm1 = LayerNorm(width, NORM_EPS, dtype, device)
        self.attn1 = SelfAttention(width, heads, dtype, device, biased=False)
        self.norm2 = LayerNorm(width, NORM_EPS, dtype, device)
        self.attn2 = CrossAttention(width, heads, context, dtype, device)
        self.norm3 = LayerNorm(width, NORM_EPS, dtype, device)
        self.ff = FeedForward(width, dtype, device)

    def __call__(self, x: Tensor, context: Tensor) -> Tensor:
        x = (x + self.attn1(self.norm1(x))).contiguous()
        x = (x + self.attn2(self.norm2(x), context)).contiguous()
        return (x + self.ff(self.norm3(x))).contiguous()


class Transformer2D:
    """`depth` blocks over the pixels of an image."""

    def __init__(self, channels: int, heads: int, depth: int, context: int, groups: int, dtype: DType,
                 device: str | None) -> None:
        self.norm = GroupNorm(groups, channels, GROUP_NORM_EPS, dtype, device)
        self.proj_in = Linear(channels, channels, dtype, device)
        self.transformer_blocks = [TransformerBlock(channels, heads, context, dtype, device)
                                   for _ in range(depth)]
        self.proj_out = Linear(channels, channels, dtype, device)

    def __call__(self, x: Tensor, context: Tensor) -> Tensor:
        B, H, W, C = x.shape
        h = self.proj_in(self.norm(x).reshape(B, H * W, C)).contiguous()
        for block in self.transformer_blocks: h = block(h, context)
        return (x + self.proj_out(h).reshape(B, H, W, C)).contiguous()


class PixelAttention:
    """Self-attention of one head over the pixels of an image, added to it: of autoencoders."""
    STORED: ClassVar = {"attention": ("",)}

    def __init__(self, channels: int, groups: int, dtype: DType, device: str | None) -> None:
        self.group_norm = GroupNorm(groups, channels, GROUP_NORM_EPS, dtype, device)
        self.attention = SelfAttention(channels, 1, dtype, device, biased=True)

    def __call__(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        made = self.attention(self.group_norm(x).reshape(B, H * W, C)).reshape(B, H, W, C)
        return (x + made).contiguous()
