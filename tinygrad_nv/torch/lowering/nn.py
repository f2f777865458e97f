"""Layers: matmuls, norms, convolutions, embeddings, pooling, attention, as patterns and named functions take
them.

Torch's flash attention for CPUs is ours, forward and backward. Gradients that have no formula here are those
of tinygrad: the layer is written down once more, and `gradient_of` asks for what torch asks for.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv import functional
from tinygrad_nv.torch.lowering.checks import check_index
from tinygrad_nv.torch.lowering.table import Number, Out, Unsupported, lowers


def gradient_of(layer: Callable[..., Tensor], grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a layer's arguments, for that of its result."""
    if any(a.uop is b.uop for a, b in combinations(given, 2)):
        raise Unsupported("the gradient of a layer, two arguments of which are one tensor")
    return tuple(layer(*given).gradient(*given, gradient=grad))


@lowers("mm.default", "bmm.default")
def _mm(out: Out, x: Tensor, y: Tensor) -> Tensor: return x @ y


@lowers("addmm.default", "baddbmm.default")
def _addmm(out: Out, bias: Tensor, x: Tensor, y: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    made = x @ y if alpha == 1 else (x @ y) * alpha
    return made + (bias if beta == 1 else bias * beta)


@lowers("dot.default", "mv.default")
def _dot(out: Out, x: Tensor, y: Tensor) -> Tensor: return x.matmul(y)


@lowers("native_layer_norm.default")
def _layer_norm(out: Out, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
                eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    made = x.layernorm(axes, eps)
    if weight is not None: made = made * weight
    if bias is not None: made = made + bias
    wide = x.cast(dtypes.float32) if x.dtype in (dtypes.float16, dtypes.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    return made, mean, ((wide - mean).square().mean(axes, keepdim=True) + eps).rsqrt()


@lowers("embedding.default")
def _embedding(out: Out, weight: Tensor, indices: Tensor, padding_idx: int = -1,
               scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    return functional.embedding(weight, check_index("embedding", indices, weight.shape[0]))


@lowers("embedding_dense_backward.default")
def _embedding_backward(out: Out, grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int,
                        scale_grad_by_freq: bool) -> Tensor:
    if scale_grad_by_freq: raise Unsupported("gradients of an embedding, scaled by how often a row is used")
    weight = Tensor.empty(num_weights, grad.shape[-1], dtype=grad.dtype, device=out.device)
    made = functional.embedding(weight, indices).gradient(weight, gradient=grad)[0]
    if padding_idx < 0: return made
    return (Tensor.arange(num_weights).unsqueeze(-1) == padding_idx).where(0, made)


@lowers("convolution.default")
def _convolution(out: Out, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
                 padding: Sequence[int], dilation: Sequence[int], transposed: bool,
                 output_padding: Sequence[int], groups: int) -> Tensor:
    return _convolve(x, weight, bias, stride, padding, dilation, transposed, groups)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
               dilation: Sequence[int], transposed: bool, groups: int) -> Tensor:
    if transposed: raise Unsupported("a transposed convolution")
    kernel = tuple(weight.shape[2:])
    patches = kernel == tuple(stride) and not any(padding) and set(dilation) == {1} and groups == 1
    if patches and all(n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True)):
        return _convolve_patches(x, weight, bias, kernel)
    sides = [side for pad in reversed(padding) for side in (pad, pad)]
    return x.conv2d(weight, bias, groups, tuple(stride), tuple(dilation), sides)


def _convolve_patches(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: tuple[int, ...]) -> Tensor:
    """A convolution of patches that do not overlap: one matmul."""
    batch, channels, *extents = x.shape
    blocks = [n // k for n, k in zip(extents, kernel, strict=True)]
    split = [each for pair in zip(blocks, kernel, strict=True) for each in pair]
    last, rank = 2 + len(split), len(blocks)
    order = (0, *range(2, last, 2), 1, *range(3, last, 2))
    rows = x.reshape(batch, channels, *split).permute(order).reshape(batch, *blocks, -1)
    made = rows @ weight.reshape(weight.shape[0], -1).transpose(0, 1)
    if bias is not None: made = made + bias
    return made.permute(0, rank + 1, *range(1, rank + 1))


@lowers("convolution_backward.default")
def _convolution_backward(out: Out, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any,
                          stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
                          transposed: bool, output_padding: Sequence[int], groups: int,
                          output_mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return _convolve(x, weight, None, stride, padding, dilation, transposed, groups)
    made = gradient_of(layer, grad, x, weight)
    bias = grad.sum((0, *range(2, grad.ndim)))
    return tuple(each if wanted else None for each, wanted in zip((*made, bias), output_mask, strict=True))


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


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None,
             scale: float | None) -> Tensor:
    """softmax(scale · q kᵀ + mask) v of [B, H, S, D], with key heads that serve several query heads."""
    if causal and mask is not None: mask, causal = mask + _causal(q, k), False
    return functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, k.shape[1] != q.shape[1],
                                                   scale=scale)


def _causal(q: Tensor, k: Tensor) -> Tensor:
    seen = Tensor.ones(q.shape[-2], k.shape[-2], device=q.device, dtype=q.dtype).tril()
    return (seen == 0).where(-math.inf, 0)


def _logsumexp(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """log Σ exp of each row's scores: [B, H, S], float32. No kernel runs for it unless it is read."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.unsqueeze(2).expand(*k.shape[:2], groups, *k.shape[2:]).reshape(*q.shape[:2], *k.shape[2:])
    s = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal: s = s + _causal(q, k).float()
    if mask is not None: s = s + mask.float()
    return s.logsumexp(-1)


@lowers("_scaled_dot_product_flash_attention_for_cpu.default")
def _flash(out: Out, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
           attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    if dropout_p: raise Unsupported("attention with dropout: the numbers it drops are torch's")
    return (attend(q, k, v, is_causal, attn_mask, scale), _logsumexp(q, k, is_causal, attn_mask, scale))


@lowers("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_backward(out: Out, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor,
                    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None,
                    scale: float | None = None) -> tuple[Any, ...]:
    if dropout_p: raise Unsupported("attention with dropout: the numbers it drops are torch's")
    return gradient_of(lambda q, k, v: attend(q, k, v, is_causal, attn_mask, scale), grad, q, k, v)
