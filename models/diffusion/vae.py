"""The autoencoder between images and latents (AutoencoderKL of diffusers; arXiv 2112.10752).

Protocol: images are (B, H, W, 3) in −1 … 1, latents (B, H / factor, W / factor, latent_channels). `encode`
gives mean and log variance of latents, `decode` an image. Both work on unscaled latents: those of the UNet
are multiplied by the config's `scaling`. With `tile`, images are decoded in overlapping tiles of so many
latents, whose overlaps are blended: memory for activations then does not grow with the image.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from .blocks import DownBlock, Downsample, PlainMidBlock, PlainUpBlock, ResNet, Upsample
from .config import VAEConfig
from .layers import Conv2d, GroupNorm, Linear
from .transformer import PixelAttention

EPS = 1e-6
SHARE = 4           # tiles overlap by such a part of theirs
LOG_VARIANCE = (-30.0, 20.0)


class _Half:
    """The layers that encoder and decoder share."""

    def __init__(self, config: VAEConfig, dtype: DType, device: str | None) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    def _resnet(self, inputs: int, outputs: int) -> ResNet:
        return ResNet(inputs, outputs, self.config.groups, EPS, 0, self.dtype, self.device)

    def _mid(self) -> PlainMidBlock:
        c, width = self.config, self.config.channels[-1]
        attentions = [PixelAttention(width, c.groups, self.dtype, self.device)] if c.mid_attention else []
        return PlainMidBlock([self._resnet(width, width) for _ in range(2)], attentions)

    def _conv(self, inputs: int, outputs: int) -> Conv2d:
        return Conv2d(inputs, outputs, 3, self.dtype, self.device, padding=1)

    def _norm(self, channels: int) -> GroupNorm:
        return GroupNorm(self.config.groups, channels, EPS, self.dtype, self.device, "silu")


class Encoder(_Half):
    """Images to mean | log variance."""

    def __init__(self, config: VAEConfig, dtype: DType, device: str | None) -> None:
        super().__init__(config, dtype, device)
        c = config.channels
        self.conv_in = self._conv(config.in_channels, c[0])
        self.down_blocks = [
            DownBlock([self._resnet(width if j else c[max(i - 1, 0)], width)
                       for j in range(config.layers)], [],
                      Downsample(width, 0, dtype, device) if i < len(c) - 1 else None)
            for i, width in enumerate(c)]
        self.mid_block = self._mid()
        self.conv_norm_out = self._norm(c[-1])
        self.conv_out = self._conv(c[-1], 2 * config.latent_channels)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks: x, _ = block(x, None, None)
        return self.conv_out(self.conv_norm_out(self.mid_block(x)))


class Decoder(_Half):
    """Latents to images."""

    def __init__(self, config: VAEConfig, dtype: DType, device: str | None) -> None:
        super().__init__(config, dtype, device)
        c = config.channels[::-1]
        self.conv_in = self._conv(config.latent_channels, c[0])
        self.mid_block = self._mid()
        self.up_blocks = [
            PlainUpBlock([self._resnet(width if j else c[max(i - 1, 0)], width)
                          for j in range(config.layers + 1)],
                         Upsample(width, dtype, device) if i < len(c) - 1 else None)
            for i, width in enumerate(c)]
        self.conv_norm_out = self._norm(c[-1])
        self.conv_out = self._conv(c[-1], config.out_channels)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks: x = block(x)
        return self.conv_out(self.conv_norm_out(x))


class VAE:
    """The network. Parameters are allocated, not set."""

    def __init__(self, config: VAEConfig, dtype: DType = dtypes.float32, device: str | None = None,
                 encodes: bool = True) -> None:
        def mixing(channels: int, there: bool) -> Linear | None:
            return Linear(channels, channels, dtype, device) if there else None
        self.config, self.dtype = config, dtype
        self.encoder = Encoder(config, dtype, device) if encodes else None
        self.quant_conv = mixing(2 * config.latent_channels, config.quant and encodes)
        self.post_quant_conv = mixing(config.latent_channels, config.post_quant)
        self.decoder = Decoder(config, dtype, device)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latents of images."""
        assert self.encoder is not None, "a VAE that was loaded to decode only"
        h = self.encoder(images.cast(self.dtype).contiguous())
        if self.quant_conv is not None: h = self.quant_conv(h)
        mean, log_variance = h.chunk(2, -1)
        return mean, log_variance.clip(*LOG_VARIANCE)

    def decode(self, latents: Tensor) -> Tensor:
        """The images of latents."""
        x = latents.cast(self.dtype).contiguous()
        if self.post_quant_conv is not None: x = self.post_quant_conv(x).contiguous()
        return self.decoder(x)


def decode_tiles(latents: np.ndarray, tile: int, factor: int,
                  decode: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """An image (H, W, C) of latents (h, w, c), decoded in tiles of `tile` latents along a side, which overlap
    by a fourth. Where they do, one fades into the next."""
    overlap = tile // SHARE
    step, blend, keep = tile - overlap, overlap * factor, (tile - overlap) * factor
    above, lines = list[np.ndarray](), list[np.ndarray]()
    for y in range(0, latents.shape[0], step):
        line: list[np.ndarray] = []
        for x in range(0, latents.shape[1], step):
            made = decode(np.ascontiguousarray(latents[y:y + tile, x:x + tile]))
            if above: made = _fade(above[len(line)], made, blend, 0)
            if line: made = _fade(line[-1], made, blend, 1)
            line.append(made)
        lines.append(np.concatenate([each[:keep, :keep] for each in line], 1))
        above = line
    return np.concatenate(lines, 0)


def _fade(before: np.ndarray, after: np.ndarray, most: int, axis: int) -> np.ndarray:
    """`after`, whose first lines along an axis come out of the last ones of `before`."""
    count = min(before.shape[axis], after.shape[axis], most)
    old = np.take(before, range(before.shape[axis] - count, before.shape[axis]), axis)
    new = np.take(after, range(count), axis)
    share = (np.arange(count, dtype=np.float32) / count).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    return np.concatenate([old * (1 - share) + new * share,
                           np.take(after, range(count, after.shape[axis]), axis)], axis)
