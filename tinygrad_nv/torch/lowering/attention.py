"""Attention: torch's flash attention for CPUs is ours, forward and backward."""
from __future__ import annotations

import math
from typing import Any

from tinygrad import Tensor

from tinygrad_nv import functional
from tinygrad_nv.torch.lowering.nn import gradient_of
from tinygrad_nv.torch.lowering.table import Out, Unsupported, lowers


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
