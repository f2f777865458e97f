"""Layers of channels-last images (B, H, W, C), under the names that diffusers' checkpoints have.

Protocol: parameters are allocated, not set. `weights.py` walks the attributes of a network: the name of a
tensor is the path to it, with `STORED` of a class for attributes whose tensors have other names, or which are
several stored ones, one below the other. Filters lie as (O, KH, KW, C).
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.functional import convolution, group_norm

Padding = tuple[int, int, int, int]


class Conv2d:
    """A convolution with bias of square filters. `padding`: around, or (above, below, left, right)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dtype: DType, device: str | None,
                 stride: int = 1, padding: int | Padding = 0) -> None:
        self.weight = Tensor.empty(outputs, kernel, kernel, inputs, dtype=dtype, device=device)
        self.bias = Tensor.empty(outputs, dtype=dtype, device=device)
        self.stride, self.padding = stride, (padding,) * 4 if isinstance(padding, int) else padding

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The convolution of x, plus `residual`, which is of the result's shape."""
        return convolution(x, self.weight, self.bias, stride=(self.stride, self.stride), padding=self.padding,
                           residual=residual)


class GroupNorm:
    """Group norm, of `activation` "silu" with that behind it."""

    def __init__(self, groups: int, channels: int, eps: float, dtype: DType, device: str | None,
                 activation: str = "") -> None:
        self.weight = Tensor.empty(channels, dtype=dtype, device=device)
        self.bias = Tensor.empty(channels, dtype=dtype, device=device)
        self.groups, self.eps, self.activation = groups, eps, activation

    def __call__(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """The norm of x, plus `shift` (B, C)."""
        return group_norm(x, self.groups, self.weight, self.bias, self.eps, self.activation, shift)


class Linear:
    """y = x Wᵀ + b; W may be several matrices, one below the other."""

    def __init__(self, inputs: int, outputs: int, dtype: DType, device: str | None,
                 bias: bool = True) -> None:
        self.weight = Tensor.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = Tensor.empty(outputs, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor: return x.linear(self.weight.T, self.bias)


class GatedLinear(Linear):
    """The first layer of GEGLU (arXiv 2002.05202): stored as value | gate, here gate | value."""


class TimeEmbedding:
    """linear_2(silu(linear_1(x)))."""

    def __init__(self, inputs: int, outputs: int, dtype: DType, device: str | None) -> None:
        self.linear_1 = Linear(inputs, outputs, dtype, device)
        self.linear_2 = Linear(outputs, outputs, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear_2(self.linear_1(x).silu().contiguous())


def upsample(x: Tensor) -> Tensor:
    """Each pixel of x (B, H, W, C) as two by two."""
    B, H, W, C = x.shape
    return x.reshape(B, H, 1, W, 1, C).expand(B, H, 2, W, 2, C).reshape(B, 2 * H, 2 * W, C)
