"""The vision tower of Qwen2.5-VL (arXiv 2502.13923, §2.1): patches to rows of the language model's width.

Protocol: `tower(patches, batch)` gives rows [P / merge², out] of patches [P, patch_width], which come window
by window (images.py); `PatchBatch` has where windows and images begin and how patches rotate. No extent
depends on an image: one captured step serves every image of at most P patches. Attention is in windows, or
over the whole image in some layers. RMSNorm and softmax are computed in float32, everything else in the
parameters' dtype.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.runtime.observe.ranges import layer

from ..attention import rotate
from ..layers import Linear, RMSNorm, activate
from .config import VisionConfig

EPS = 1e-6      # of the tower's norms


@dataclass(frozen=True)
class PatchBatch:
    """`cos` and `sin`, float32 [P, head / 2]; `images` and `windows`, int32: the first patch of each, and the
    end of the last. Patches behind it are padding."""
    cos: Tensor
    sin: Tensor
    images: Tensor
    windows: Tensor


class VisionBlock:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: VisionConfig, index: int, dtype: DType, device: str | None) -> None:
        def linear(inputs: int, outputs: int) -> Linear: return Linear(inputs, outputs, True, dtype, device)
        self.config, self.whole = config, index in config.full
        hidden, width = config.hidden, config.intermediate
        self.attention_norm, self.feed_forward_norm = (RMSNorm(hidden, EPS, dtype, device) for _ in range(2))
        self.qkv, self.output = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.gate_up, self.down = linear(hidden, 2 * width), linear(width, hidden)

    def __call__(self, x: Tensor, batch: PatchBatch) -> Tensor:
        with layer("attention"):
            x = (x + self.attend(self.attention_norm(x), batch)).contiguous()
        with layer("feed_forward"): return (x + self.feed_forward(self.feed_forward_norm(x))).contiguous()

    def attend(self, x: Tensor, batch: PatchBatch) -> Tensor:
        """The attention half."""
        c = self.config
        heads = self.qkv(x).contiguous().reshape(-1, 3, c.heads, c.hidden // c.heads)
        q, k, v = (heads[:, i] for i in range(3))
        cos, sin = batch.cos.unsqueeze(1), batch.sin.unsqueeze(1)
        q, k = (rotate(each.float(), cos, sin).cast(x.dtype).contiguous() for each in (q, k))
        starts = batch.images if self.whole else batch.windows
        longest = int(x.shape[0]) if self.whole else c.window_rows ** 2 * c.unit
        made = F.varlen_attention(q, k, v.contiguous(), starts, starts, longest, longest)
        return self.output(made.reshape(x.shape[0], -1).contiguous())

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward half."""
        # split: in one kernel each would be computed for all columns of both
        gate, up = (half.contiguous() for half in
                    self.gate_up(x).contiguous().split([self.config.intermediate] * 2, dim=-1))
        return self.down((gate.silu() * up).contiguous())


class VisionTower:
    """The network. Parameters are allocated, not set: `weights.load` fills them."""

    def __init__(self, config: VisionConfig, dtype: DType = dtypes.float32,
                 device: str | None = None) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.patches = Linear(config.patch_width, config.hidden, False, dtype, device)
        self.blocks = [VisionBlock(config, i, dtype, device) for i in range(config.layers)]
        self.norm = RMSNorm(config.hidden, EPS, dtype, device)
        width = config.hidden * config.unit
        self.merge = Linear(width, width, True, dtype, device)
        self.output = Linear(width, config.out, True, dtype, device)

    def __call__(self, patches: Tensor, batch: PatchBatch) -> Tensor:
        """See above."""
        x = self.patches(patches.cast(self.dtype).contiguous()).contiguous()
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch)
        with layer("merge"):
            x = self.merge(self.norm(x).reshape(-1, self.config.hidden * self.config.unit)).contiguous()
            return self.output(activate(x, "gelu").contiguous())
