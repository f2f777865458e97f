"""Blocks of the UNet and of the autoencoder.

Protocol: images are (B, H, W, C); `time` is silu of the time embedding (B, width), None in an autoencoder. A
block of the UNet's way down returns its result and what the way up concatenates with: the result of each
layer, and of the downsampling.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from .layers import Conv2d, GroupNorm, Linear, upsample
from .transformer import PixelAttention, Transformer2D


class ResNet:
    """conv2(silu(norm2(conv1(silu(norm1(x))) + time))) + x, x through `conv_shortcut` where the number of
    channels changes."""

    def __init__(self, inputs: int, outputs: int, groups: int, eps: float, time: int, dtype: DType,
                 device: str | None) -> None:
        self.norm1 = GroupNorm(groups, inputs, eps, dtype, device, "silu")
        self.conv1 = Conv2d(inputs, outputs, 3, dtype, device, padding=1)
        self.time_emb_proj = Linear(time, outputs, dtype, device) if time else None
        self.norm2 = GroupNorm(groups, outputs, eps, dtype, device, "silu")
        self.conv2 = Conv2d(outputs, outputs, 3, dtype, device, padding=1)
        self.conv_shortcut = Linear(inputs, outputs, dtype, device) if inputs != outputs else None

    def __call__(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        shift = None if time is None or self.time_emb_proj is None else self.time_emb_proj(time)
        h = self.norm2(self.conv1(self.norm1(x)), shift)
        return self.conv2(h, residual=x if self.conv_shortcut is None else
                          self.conv_shortcut(x).contiguous())


class Downsample:
    """Half the size, by a convolution of stride 2. Without padding, a row below and a column to the right
    are zeros."""

    def __init__(self, channels: int, padding: int, dtype: DType, device: str | None) -> None:
        self.conv = Conv2d(channels, channels, 3, dtype, device, 2, padding or (0, 1, 0, 1))

    def __call__(self, x: Tensor) -> Tensor: return self.conv(x)


class Upsample:
    """Twice the size, then a convolution; cut off to `size`, where a side is odd."""

    def __init__(self, channels: int, dtype: DType, device: str | None) -> None:
        self.conv = Conv2d(channels, channels, 3, dtype, device, padding=1)

    def __call__(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        wide = upsample(x)
        if size is not None: wide = wide[:, :size[0], :size[1]]
        return self.conv(wide.contiguous())


class DownBlock:
    """Layers, then half the size but for the last block."""

    def __init__(self, layers: list[ResNet], attentions: list[Transformer2D],
                 down: Downsample | None) -> None:
        self.resnets, self.attentions = layers, attentions
        self.downsamplers = [down] if down is not None else []

    def __call__(self, x: Tensor, time: Tensor | None, context: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        made = []
        for i, resnet in enumerate(self.resnets):
            x = resnet(x, time)
            if self.attentions and context is not None: x = self.attentions[i](x, context)
            made.append(x)
        for down in self.downsamplers: made.append(x := down(x))
        return x, made


class UpBlock:
    """Layers over x beside what the way down made, then twice the size but for the last block."""

    def __init__(self, layers: list[ResNet], attentions: list[Transformer2D], up: Upsample | None) -> None:
        self.resnets, self.attentions = layers, attentions
        self.upsamplers = [up] if up is not None else []

    def __call__(self, x: Tensor, skips: list[Tensor], time: Tensor, context: Tensor) -> Tensor:
        """Takes what it concatenates with from the end of `skips`."""
        for i, resnet in enumerate(self.resnets):
            x = resnet(x.cat(skips.pop(), dim=-1).contiguous(), time)
            if self.attentions: x = self.attentions[i](x, context)
        for up in self.upsamplers: x = up(x, tuple(skips[-1].shape[1:3]))
        return x


class MidBlock:
    """A layer, attention, a layer."""

    def __init__(self, layers: list[ResNet], attentions: list[Transformer2D]) -> None:
        self.resnets, self.attentions = layers, attentions

    def __call__(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.resnets[0](x, time)
        for attention, resnet in zip(self.attentions, self.resnets[1:], strict=True):
            x = resnet(attention(x, context), time)
        return x


class PlainMidBlock:
    """The middle block of an autoencoder."""

    def __init__(self, layers: list[ResNet], attentions: list[PixelAttention]) -> None:
        self.resnets, self.attentions = layers, attentions

    def __call__(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)
        for attention in self.attentions: x = attention(x)
        return self.resnets[1](x)


class PlainUpBlock:
    """Layers, then twice the size but for the last block: of an autoencoder."""

    def __init__(self, layers: list[ResNet], up: Upsample | None) -> None:
        self.resnets, self.upsamplers = layers, [up] if up is not None else []

    def __call__(self, x: Tensor) -> Tensor:
        for resnet in self.resnets: x = resnet(x)
        for up in self.upsamplers: x = up(x)
        return x
