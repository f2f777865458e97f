"""Attention: the op of ai.onnx and those of com.microsoft, on this package's attention.

Protocol: heads are brought to [batch, heads, sequence, size], every mask to one that is added to the scores
(0 or -inf), or to a causal one that the kernel computes itself. Where a node asks for the scores, too, they
are computed beside it.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.functional import scaled_dot_product_attention
from tinygrad_nv.onnx.elements import dtype_of
from tinygrad_nv.onnx.table import Call, op

OUTSIDE = -math.inf


def heads(x: Tensor, number: int | None) -> Tensor:
    """[batch, sequence, heads · size] as [batch, heads, sequence, size]."""
    if x.ndim == 4: return x
    if not number: raise OnnxError("an input of three dimensions without a number of heads",
                                   "q_num_heads and kv_num_heads")
    return x.reshape(*x.shape[:2], number, -1).transpose(1, 2)


@dataclass(frozen=True)
class Masks:
    """Rules that hide keys from queries. `first` is the position of the first query among the keys, one
    number or one for each sequence; left and right are distances, -1 without a limit."""
    causal: bool
    left: int
    right: int
    first: int | Tensor
    valid: Tensor | None    # keys of each sequence that count: [batch]

    def plain(self, queries: int, keys: int) -> bool:
        """Whether the kernel's own causal mask, or none, is this one."""
        if self.valid is not None or self.left >= 0 or self.right >= 0: return False
        return not self.causal or (self.first == 0 if isinstance(self.first, int) else False)

    def to_addend(self, queries: int, keys: int, dtype: object) -> Tensor:
        """0 where a key is seen and -inf elsewhere: [queries, keys] or [batch, 1, queries, keys]."""
        row, column = Tensor.arange(queries).reshape(-1, 1), Tensor.arange(keys).reshape(1, -1)
        offset = self.first if isinstance(self.first, int) else self.first.reshape(-1, 1, 1, 1)
        seen = Tensor.ones(queries, keys, dtype=dtypes.bool, buffer=False)
        distance = column - row - offset
        if self.causal: seen = seen & (distance <= 0)
        if self.left >= 0: seen = seen & (distance >= -self.left)
        if self.right >= 0: seen = seen & (distance <= self.right)
        if self.valid is not None: seen = seen & (column < self.valid.reshape(-1, 1, 1, 1))
        return seen.where(0.0, OUTSIDE).cast(dtype)


@op("Attention", since=23, call=True)
def attention(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
              past_key: Tensor | None = None, past_value: Tensor | None = None, nonpad: Tensor | None = None,
              is_causal: int = 0, q_num_heads: int | None = None, kv_num_heads: int | None = None,
              qk_matmul_output_mode: int = 0, scale: float | None = None, softcap: float = 0.0,
              softmax_precision: int | None = None, left_window_size: int = -1, right_window_size: int = -1
              ) -> tuple[Tensor | None, ...]:
    """softmax(scale · q kᵀ + masks) v, the keys and values with those before, and the scores if asked for."""
    flat = q.ndim == 3
    q, k, v = heads(q, q_num_heads), heads(k, kv_num_heads), heads(v, kv_num_heads)
    first: int | Tensor = 0
    if past_key is not None and past_value is not None:
        first, k, v = int(past_key.shape[2]), past_key.cat(k, dim=2), past_value.cat(v, dim=2)
    elif nonpad is not None: first = nonpad - int(q.shape[2])
    masks = Masks(bool(is_causal), left_window_size, right_window_size, first, nonpad)
    queries, keys = int(q.shape[2]), int(k.shape[2])
    added = None if mask is None else _fill_mask(mask, keys)
    causal = bool(is_causal) and added is None and masks.plain(queries, keys)
    if not (causal or (masks.plain(queries, keys) and not is_causal)):
        own = masks.to_addend(queries, keys, q.dtype)
        added = own if added is None else _as_added(added, q.dtype) + own
    scores = None
    if len(call.node.outputs) > 3 and call.node.outputs[3]:
        full = masks.to_addend(queries, keys, q.dtype) if causal else None if added is None else \
            _as_added(added, q.dtype)
        scores = _scores(q, k, full, scale, softcap, qk_matmul_output_mode, softmax_precision)
    # a causal kernel counts from the first key, whatever the number of keys
    out = scaled_dot_product_attention(q, k, v, added, is_causal=causal, enable_gqa=True, scale=scale,
                                       softcap=softcap or None).cast(q.dtype)
    return (out.transpose(1, 2).flatten(2) if flat else out), k, v, scores


def _fill_mask(mask: Tensor, keys: int) -> Tensor:
    """A mask that hides the keys which it lacks."""
    missing = keys - int(mask.shape[-1])
    if missing <= 0: return mask
    outside: bool | float = False if mask.dtype == dtypes.bool else OUTSIDE
    return mask.pad((*[None] * (mask.ndim - 1), (0, missing)), value=outside)


def _as_added(mask: Tensor, dtype: object) -> Tensor:
    """A mask of bools as one that is added."""
    return mask.where(0.0, OUTSIDE).cast(dtype) if mask.dtype == dtypes.bool else mask


def _scores(q: Tensor, k: Tensor, added: Tensor | None, scale: float | None, softcap: float, mode: int,
            precision: int | None) -> Tensor:
    """Scores as `qk_matmul_output_mode` says: raw, soft-capped, masked, or after the softmax."""
    if (times := int(q.shape[1]) // int(k.shape[1])) > 1: k = k.repeat_interleave(times, 1)
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(int(q.shape[-1])))
    made = (q * root) @ (k * root).transpose(-1, -2)
    if mode == 0: return made
    if softcap: made = (made / softcap).tanh() * softcap
    if mode == 1: return made
    if added is not None: made = made + added
    if mode == 2: return made
    made = made.cast(dtype_of(precision)) if precision else made
    hidden = made.max(-1, keepdim=True).isinf() & (made.max(-1, keepdim=True) < 0)
    return hidden.where(0, hidden.where(0, made).softmax(-1)).cast(q.dtype)


@op("Attention", domain="tinygrad_nv")
def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float,
                    grouped: bool) -> Tensor:
    """softmax(scale · q k + mask) v of [..., queries, size], [..., size, keys] and [..., keys, size]
    (fusion.py). `grouped`: k is [batch, heads, keys, size], of fewer heads than q."""
    if mask is not None: mask = mask.cast(q.dtype)
    if not grouped: k = k.transpose(-1, -2)
    same = q.ndim > 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if not same and not (grouped and q.shape[0] == k.shape[0] == v.shape[0]):
        times = int(q.shape[1]) // int(k.shape[1]) if grouped else 1
        if grouped: k, v = (each.repeat_interleave(times, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) * scale
        return (scores if mask is None else scores + mask).softmax(-1) @ v
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
