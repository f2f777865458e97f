"""The UNet that predicts the noise of latents (arXiv 2112.10752), and XL's (arXiv 2307.01952).

Protocol: `unet(latents, times, context, added)` of latents (B, H, W, in_channels), times (B,), a text's
states (B, T, context) and, of XL, `added` (B, added_width) as `make_added_inputs` makes it, gives
(B, H, W, out_channels).
"""
from __future__ import annotations

import math

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from .blocks import DownBlock, Downsample, MidBlock, ResNet, UpBlock, Upsample
from .config import UNetConfig
from .layers import Conv2d, GroupNorm, TimeEmbedding
from .transformer import Transformer2D

PERIOD = 10000  # the longest of the sines


def sinusoids(times: Tensor, width: int, flip: bool, shift: float) -> Tensor:
    """sin | cos of times (N,) at width / 2 frequencies (arXiv 1706.03762), float32 (N, width); with `flip`
    cos | sin."""
    half = width // 2
    steps = Tensor.arange(half, dtype=dtypes.float32)
    angles = times.float().unsqueeze(1) * (steps * (-math.log(PERIOD) / (half - shift))).exp().unsqueeze(0)
    parts = (angles.cos(), angles.sin()) if flip else (angles.sin(), angles.cos())
    return parts[0].cat(parts[1], dim=-1)


class UNet:
    """The network. Parameters are allocated, not set."""

    def __init__(self, config: UNetConfig, dtype: DType = dtypes.float32, device: str | None = None) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        c, last = config.channels, len(config.channels) - 1
        self.conv_in = Conv2d(config.in_channels, c[0], 3, dtype, device, padding=1)
        self.time_embedding = TimeEmbedding(c[0], config.time_width, dtype, device)
        self.add_embedding: TimeEmbedding | None = None
        if config.added:
            self.add_embedding = TimeEmbedding(config.added_width, config.time_width, dtype, device)
        self.down_blocks = [self._down(i) for i in range(len(c))]
        self.mid_block = MidBlock([self._resnet(c[last], c[last]) for _ in range(2)],
                                  [self._transformer(last)])
        self.up_blocks = [self._up(i) for i in range(last, -1, -1)]
        self.conv_norm_out = GroupNorm(config.groups, c[0], config.norm_eps, dtype, device, "silu")
        self.conv_out = Conv2d(c[0], config.out_channels, 3, dtype, device, padding=1)

    def _resnet(self, inputs: int, outputs: int) -> ResNet:
        c = self.config
        return ResNet(inputs, outputs, c.groups, c.norm_eps, c.time_width, self.dtype, self.device)

    def _transformer(self, i: int) -> Transformer2D:
        c = self.config
        return Transformer2D(c.channels[i], c.heads[i], c.depths[i], c.context, c.groups, self.dtype,
                             self.device)

    def _down(self, i: int) -> DownBlock:
        c = self.config
        inputs, outputs, layers = c.channels[max(i - 1, 0)], c.channels[i], c.layers[i]
        down = Downsample(outputs, c.down_padding, self.dtype, self.device)
        return DownBlock([self._resnet(outputs if j else inputs, outputs) for j in range(layers)],
                         [self._transformer(i) for _ in range(layers if c.cross[i] else 0)],
                         down if i < len(c.channels) - 1 else None)

    def _up(self, i: int) -> UpBlock:
        """Returns the upward block of the size of block i on the way down; its last layer sees that block's
        input."""
        c = self.config
        below, outputs, layers = c.channels[min(i + 1, len(c.channels) - 1)], c.channels[i], c.layers[i] + 1
        skips = [outputs] * (layers - 1) + [c.channels[max(i - 1, 0)]]
        return UpBlock([self._resnet((outputs if j else below) + skips[j], outputs) for j in range(layers)],
                       [self._transformer(i) for _ in range(layers if c.cross[i] else 0)],
                       Upsample(outputs, self.dtype, self.device) if i else None)

    def make_added_inputs(self, pooled: Tensor, sizes: Tensor) -> Tensor:
        """Returns the inputs that XL's time embedding adds to: pooled states (B, width) beside sines of
        `sizes` (B, 6): original height and width, offsets of the crop, target height and width."""
        c = self.config
        ids = sinusoids(sizes.flatten(), c.added, c.flip_sin_to_cos, c.freq_shift)
        return pooled.cat(ids.reshape(sizes.shape[0], -1).cast(pooled.dtype), dim=-1)

    def __call__(self, latents: Tensor, times: Tensor, context: Tensor,
                 added: Tensor | None = None) -> Tensor:
        c = self.config
        sines = sinusoids(times, c.channels[0], c.flip_sin_to_cos, c.freq_shift).cast(self.dtype)
        time = self.time_embedding(sines)
        if self.add_embedding is not None and added is not None:
            time = time + self.add_embedding(added.cast(self.dtype))
        time = time.silu().contiguous()
        x = self.conv_in(latents.cast(self.dtype).contiguous())
        skips = [x]
        for down in self.down_blocks:
            x, made = down(x, time, context)
            skips += made
        x = self.mid_block(x, time, context)
        for up in self.up_blocks: x = up(x, skips, time, context)
        return self.conv_out(self.conv_norm_out(x))
