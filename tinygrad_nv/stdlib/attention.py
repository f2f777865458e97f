"""FlashAttention-2 in the tile language: forward, and the gradients of q, k and v.

Protocol: `flash_attention_2(q, k, v, causal=…, scale=…)` of q (B, H, S, D) and k, v (B, G, T, D), H a
multiple of
G (grouped queries), gives (B, H, S, D) in q's dtype. Causal: query i sees keys up to i + T - S. The forward
pass leaves each row's LSE = m + log l (B, H, S), from which the backward pass computes the probabilities
again:

    p = exp(s - LSE);  dv = pᵀ do;  dp = do vᵀ;  ds = p (dp - delta);  delta = Σ o do;  dq = ds k;  dk = dsᵀ q

(Dao 2023, FlashAttention-2, algorithms 1 and 2), with exp as a power of 2: the scale, and log2 e with it, is
one multiplication and subtraction. The gradients of k and v are sums over queries of one program: no atomics,
and the same bits at every run.
"""
from __future__ import annotations

import math
from typing import Any

from tinygrad import Tensor

from tinygrad_nv import tile
from tinygrad_nv.errors import SpecError
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.shapes import KTile, OTile
from tinygrad_nv.tile.language.names import f32
from tinygrad_nv.tile.language.schedule import TileSchedule

INF, LOG2E = float("inf"), 1 / math.log(2)
# two blocks of keys ahead where shared memory has room for three, as on an H100
FORWARD = TileSchedule(block=(128, 128), warps=8)
BACKWARD_Q = TileSchedule(block=(128, 64), warps=8, stages=2)
BACKWARD = TileSchedule(block=(64, 64), warps=4, stages=2)


@kernel.schedule(FORWARD)
def forward(q: KTile["B", "H", "S", "D"], k: KTile["B", "G", "T", "D"], v: KTile["B", "G", "T", "D"],
            lse: OTile["B", "H", "S", f32], *, causal: bool, scale: float) -> Any:
    """The result, and LSE."""
    T = tile.context()
    queries = tile.load(q, T.m, T.d)
    acc = tile.zeros((T.m, T.d), f32)
    m, l = tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    shift, factor = k.shape[2] - q.shape[2], scale * LOG2E
    end = tile.minimum(T.m.start + int(T.m) + shift, k.shape[2]) if causal else k.shape[2]
    for block in tile.range_n(end, T.n, prefetch=2):
        s = tile.dot(queries, tile.load(k, block, T.d).T)
        if causal: s = tile.where(tile.col_index(block) <= tile.row_index() + shift, s, -INF)
        if block.stop is not None: s = tile.where(tile.col_index(block) < k.shape[2], s, -INF)
        top = tile.maximum(m, tile.max(s, 1))
        # scores keep their scale, so that a multiplication and a subtraction are one instruction; a row that
        # has seen no key has no maximum
        base = tile.where(top == -INF, 0.0, top) * factor
        p, old = tile.exp2_nonpositive(s * factor - base[:, None]), tile.exp2_nonpositive(m * factor - base)
        acc = tile.dot(tile.cast(p, v.dtype), tile.load(v, block, T.d), acc * old[:, None])
        m, l = top, l * old + tile.sum(p, 1)
    tile.store(lse, m * scale + tile.log(l), T.m)
    return tile.cast(acc / l[:, None], q.dtype)


@kernel.schedule(BACKWARD_Q)
def gradient_q(q: KTile["B", "H", "S", "D"], k: KTile["B", "G", "T", "D"], v: KTile["B", "G", "T", "D"],
               o: KTile["B", "H", "S", "D"], do: KTile["B", "H", "S", "D"], lse: KTile["B", "H", "S", f32],
               delta: OTile["B", "H", "S", f32], *, causal: bool, scale: float) -> Any:
    """dq, and delta."""
    T = tile.context()
    queries, grad = tile.load(q, T.m, T.d), tile.load(do, T.m, T.d)
    own = tile.sum(tile.cast(tile.load(o, T.m, T.d), f32) * tile.cast(grad, f32), 1)
    tile.store(delta, own, T.m)
    acc = tile.zeros((T.m, T.d), f32)
    shift, factor = k.shape[2] - q.shape[2], scale * LOG2E
    base = tile.load(lse, T.m) * LOG2E
    end = tile.minimum(T.m.start + int(T.m) + shift, k.shape[2]) if causal else k.shape[2]
    for block in tile.range_n(end, T.n):
        keys = tile.load(k, block, T.d)
        p = tile.exp2_nonpositive(tile.dot(queries, keys.T) * factor - base[:, None])
        if causal: p = tile.where(tile.col_index(block) <= tile.row_index() + shift, p, 0.0)
        if block.stop is not None: p = tile.where(tile.col_index(block) < k.shape[2], p, 0.0)
        ds = p * (tile.dot(grad, tile.load(v, block, T.d).T) - own[:, None])
        acc = tile.dot(tile.cast(ds, k.dtype), keys, acc)
    return tile.cast(acc * scale, q.dtype)


@kernel.schedule(BACKWARD)
def gradient_kv(k: KTile["B", "G", "T", "D"], v: KTile["B", "G", "T", "D"], q: KTile["B", "H", "S", "D"],
                do: KTile["B", "H", "S", "D"], lse: KTile["B", "H", "S", f32], delta: KTile["B", "H", "S",
                                                                                            f32],
                dv: OTile["B", "G", "T", "D", f32], *, causal: bool, scale: float) -> Any:
    """dk in float32, and dv."""
    T = tile.context()
    groups, heads, rows = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    batch, group = T.batch // groups, T.batch % groups
    keys, values = tile.load(k, T.m, T.d), tile.load(v, T.m, T.d)
    dk, total = tile.zeros((T.m, T.d), f32), tile.zeros((T.m, T.d), f32)
    shift, factor = k.shape[2] - rows, scale * LOG2E
    begin = tile.maximum(T.m.start - shift, 0) // int(T.n) * int(T.n) if causal else 0
    for inner in tile.range(heads):
        head = group * heads + inner
        first = tile.block(begin, int(T.n))
        row, own = tile.load(lse, batch, head, first), tile.load(delta, batch, head, first)
        for block in tile.range_n(rows, T.n, start=begin):
            queries, grad = tile.load(q, batch, head, block, T.d), tile.load(do, batch, head, block, T.d)
            # beyond the last query all is 0: p is 1 there, and adds nothing
            p = tile.exp2_nonpositive(tile.dot(keys, queries.T) * factor - (row * LOG2E)[None, :])
            if causal: p = tile.where(T.m.indices[:, None] <= block.indices[None, :] + shift, p, 0.0)
            # what the next block needs comes while this one is multiplied
            after = block + int(T.n)
            row_after, own_after = tile.load(lse, batch, head, after), tile.load(delta, batch, head, after)
            total = tile.dot(tile.cast(p, do.dtype), grad, total)
            ds = p * (tile.dot(values, grad.T) - own[None, :])
            dk = tile.dot(tile.cast(ds, q.dtype), queries, dk)
            row, own = row_after, own_after
    tile.store(dv, total, T.m, T.d)
    return dk * scale


@forward.defvjp
def _vjp(inputs: Any, outputs: Any, gradients: Any, *, causal: bool, scale: float) -> Any:
    (q, k, v), (o, lse), do = inputs, outputs, gradients[0]
    if do is None: raise SpecError("a gradient of the LSE of flash_attention_2", "a gradient of its result")
    grad = do.cast(q.dtype).contiguous()
    dq, delta = gradient_q(q, k, v, o, grad, lse, causal=causal, scale=scale)
    dk, dv = gradient_kv(k, v, q, grad, lse, delta, causal=causal, scale=scale)
    return dq, dk.cast(k.dtype), dv.cast(v.dtype)


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor, causal: bool = False,
                      scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale) v, of q (B, H, S, D) and k, v (B, G, T, D) of one float dtype; `scale` is by
    default
    1 / sqrt(D). Differentiable. `forward`, `gradient_q` and `gradient_kv` are its kernels: a schedule of the
    user's is set by `forward.schedule(…)`."""
    made: Tensor = forward(q, k, v, causal=causal, scale=q.shape[-1] ** -0.5 if scale is None else scale)[0]
    return made
