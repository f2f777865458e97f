"""Pooling of images: maxima and means of windows, and their gradients."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.torch.lowering.nn import gradient_of
from tinygrad_nv.torch.lowering.table import Out, Unsupported, lowers


def _pair(n: Sequence[int]) -> tuple[int, ...]: return (n[0], n[0]) if len(n) == 1 else tuple(n)


def _to_batch(x: Tensor) -> Tensor:
    """Images [N, C, H, W], of one image too."""
    return x if x.ndim == 4 else x.unsqueeze(0)


@lowers("max_pool2d_with_indices.default")
def _max_pool(out: Out, x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (),
              padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False
              ) -> tuple[Tensor, Tensor]:
    values, indices = _to_batch(x).max_pool2d(_pair(kernel), _pair(stride or kernel), _pair(dilation),
                                             _pair(padding), ceil_mode, return_indices=True)
    shape = values.shape[4 - x.ndim:]
    return values.reshape(shape), indices.reshape(shape)


@lowers("max_pool2d_with_indices_backward.default")
def _max_pool_backward(out: Out, grad: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int],
                       padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool,
                       indices: Tensor) -> Tensor:
    flat = Tensor.zeros(*x.shape[:-2], x.shape[-2] * x.shape[-1], dtype=grad.dtype, device=out.device)
    return flat.scatter_reduce(-1, indices.flatten(-2), grad.flatten(-2), "sum").reshape(x.shape)


@lowers("avg_pool2d.default")
def _avg_pool(out: Out, x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (),
              padding: Sequence[int] = (0,), ceil_mode: bool = False, count_include_pad: bool = True,
              divisor: int | None = None) -> Tensor:
    if divisor is not None: raise Unsupported("means with a divisor of their own")
    made = _to_batch(x).avg_pool2d(_pair(kernel), _pair(stride or kernel), 1, _pair(padding), ceil_mode,
                                  count_include_pad)
    return made.reshape(made.shape[4 - x.ndim:])


@lowers("avg_pool2d_backward.default")
def _avg_pool_backward(out: Out, grad: Tensor, x: Tensor, *more: Any) -> Tensor:
    return gradient_of(lambda x: _avg_pool(out, x, *more), grad, x)[0]
