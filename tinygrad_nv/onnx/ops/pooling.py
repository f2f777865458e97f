"""Maxima of windows with their places, and the way back; norms of windows; pads of convolutions.

Protocol: an index counts elements of the whole input, its batch and channels included; within an image rows
come first, or with `storage_order` 1 columns.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.table import Call, op, tinygrads


@op("MaxPool", call=True)
def max_pool(call: Call, x: Tensor, kernel_shape: Sequence[int], storage_order: int = 0, **attributes: Any
             ) -> tuple[Tensor, ...]:
    """The maxima of windows, and where they are if a node reads that."""
    made, places = tinygrads("MaxPool")(x, kernel_shape=list(kernel_shape), **attributes)
    if len(call.node.outputs) < 2 or not call.node.outputs[1]: return (made,)
    image = [int(n) for n in x.shape[2:]]
    if storage_order:
        coordinates = []
        for n in reversed(image):
            coordinates.append(places % n)
            places = places // n
        steps = np.cumprod([1, *image[:-1]]).tolist()
        places = sum(c * step for c, step in zip(reversed(coordinates), steps, strict=True))
    first = Tensor.arange(int(x.shape[0]) * int(x.shape[1]), dtype=dtypes.int64) * math.prod(image)
    return made, places.cast(dtypes.int64) + first.reshape(x.shape[0], x.shape[1], *[1] * len(image))


@op("MaxUnpool", host=(2,))
def max_unpool(x: Tensor, indices: Tensor, output_shape: np.ndarray | None = None,
               kernel_shape: Sequence[int] = (), pads: Sequence[int] = (), strides: Sequence[int] = ()
               ) -> Tensor:
    """Maxima where MaxPool found them, zeros elsewhere. Indices count in the input of the pooling."""
    k = len(kernel_shape)
    pad, stride = pads or [0] * 2 * k, strides or [1] * k
    image = [(int(n) - 1) * stride[d] + kernel_shape[d] - pad[d] - pad[d + k]
             for d, n in enumerate(x.shape[2:])]
    shape = [*x.shape[:2], *image]
    flat = Tensor.zeros(math.prod(map(int, shape)), dtype=x.dtype).contiguous()
    made = flat.scatter(0, indices.flatten().cast(dtypes.int32), x.flatten()).reshape(shape)
    if output_shape is None: return made
    return made.pad((None, None, *((0, int(n) - m) for n, m in zip(output_shape[2:], image, strict=True))))


# **** norms ****

@op("LpPool")
def lp_pool(x: Tensor, kernel_shape: Sequence[int], p: int = 2, ceil_mode: int = 0,
            dilations: Sequence[int] = (), pads: Sequence[int] = (), strides: Sequence[int] = (),
            auto_pad: str = "NOTSET") -> Tensor:
    """(Σ |x|ᵖ)^(1/p) of windows."""
    k = len(kernel_shape)
    stride, dilation = list(strides) or [1] * k, list(dilations) or [1] * k
    amounts = window_pads(x, kernel_shape, stride, dilation, pads, auto_pad)
    if ceil_mode:       # whole windows, of which the last begins inside
        for d, n in enumerate(x.shape[2:]):
            rest = int(n) + amounts[d] + amounts[d + k] - dilation[d] * (kernel_shape[d] - 1) - 1
            more = -rest % stride[d]
            if rest + more < int(n) + amounts[d]: amounts[d + k] += more
    given = x.abs().pow(p).pad((None, None, *((amounts[d], amounts[d + k]) for d in range(k))))
    made = given.avg_pool2d(tuple(kernel_shape), stride, dilation) * math.prod(kernel_shape)
    return made.pow(1 / p).cast(x.dtype)


@op("GlobalLpPool")
def global_lp_pool(x: Tensor, p: int = 2) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) of images."""
    return x.abs().pow(p).sum(tuple(range(2, x.ndim)), keepdim=True).pow(1 / p).cast(x.dtype)


def window_pads(x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
                pads: Sequence[int], auto_pad: str) -> list[int]:
    """Elements before each dimension, and behind each: those given, or so many that there is a window for
    each stride."""
    if not auto_pad.startswith("SAME"):
        return list(pads) if pads and auto_pad == "NOTSET" else [0] * 2 * len(kernel)
    before, behind = [], []
    for n, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-int(n) // s) - 1) * s + d * (k - 1) + 1 - int(n))
        less = total // 2
        before.append(less if auto_pad == "SAME_UPPER" else total - less)
        behind.append(total - before[-1])
    return before + behind


# **** convolutions ****

@op("Conv")
def conv(x: Tensor, w: Tensor, bias: Tensor | None = None, auto_pad: str = "NOTSET",
         dilations: Sequence[int] = (), group: int = 1, kernel_shape: Sequence[int] = (),
         pads: Sequence[int] = (), strides: Sequence[int] = ()) -> Tensor:
    """tinygrad's convolution, with the pads that ONNX counts."""
    k = x.ndim - 2
    stride, dilation = list(strides) or [1] * k, list(dilations) or [1] * k
    amounts = window_pads(x, [int(n) for n in w.shape[2:]], stride, dilation, pads, auto_pad)
    made: Tensor = tinygrads("Conv")(x, w, bias, dilations=dilation, group=group, pads=amounts,
                                     strides=stride)
    return made


@op("ConvTranspose")
def conv_transpose(x: Tensor, w: Tensor, bias: Tensor | None = None, auto_pad: str = "NOTSET",
                   **attributes: Any) -> Tensor:
    """tinygrad's transposed convolution; VALID is without pads."""
    auto_pad = "NOTSET" if auto_pad == "VALID" else auto_pad
    made: Tensor = tinygrads("ConvTranspose")(x, w, bias, auto_pad=auto_pad, **attributes)
    return made
