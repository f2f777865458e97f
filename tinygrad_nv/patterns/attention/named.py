"""Attention as a function known by name, whose gradient is a function known by name: training without
matrices of S_q × S_kv in memory.

Protocol. `attend(what, q, k, v, mask)` calls FlashAttention and returns its result. For key head h // G of
query head h, G = H / H_kv, and the columns that a row sees (`FlashAttention`):

    s[r, c]    = cap · tanh(scale · (q kᵀ)[r, c] / cap) + mask[r, c]      float32; no cap, no tanh
    p          = softmax of s over c                                      of s rounded to q's dtype
    out        = p v                                                      [B, H, S_q, D_v], of v's dtype
    l[r]       = log Σ_c exp s[r, c]                                      [B, H, S_q], float32

With `documents` there are two tensors in the mask's place, first and end, int32 [B, S]: row r sees columns
first[r] ≤ c < end[r] alone (varlen.py).

With sinks there is one more summand in l, exp sink, and p has one more column, which is left out: the same
kernel computes gradients, and that of a sink is −Σ exp(sink − l) delta, over rows. A row that sees nothing
has weights of 0. With dropout p is multiplied by `keep`, after l. The references are plain
tinygrad, `out` node by node that of the library's method where no mask or window hides rows and nothing is
dropped. l is asked for by the gradient: FlashAttentionBackward, of q, k, v, mask, l, delta and the result's
gradient, with

    delta[r]   = Σ_d grad[r, d] out[r, d]                                 float32, outside of the function
    p[r, c]    = exp(s[r, c] − l[r]);   ds = p · (grad vᵀ − delta)
    dv = pᵀ grad,   dk = (ds · ∂s/∂(q kᵀ))ᵀ q,   dq = (ds · ∂s/∂(q kᵀ)) k

(FlashAttention-2, arXiv 2307.08691.) The gradient of a mask of floats is ds, summed to the mask's shape, in
plain tinygrad: who wants it has S_q × S_kv in memory. lower.py makes kernels of both functions.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tinygrad import Tensor, dtypes
from tinygrad.dtype import least_upper_dtype
from tinygrad.uop.ops import UOp

from tinygrad_nv.lazy_import import lazy_import
from tinygrad_nv.patterns import named
from tinygrad_nv.tile.attention.dropout import SPAN, philox
from tinygrad_nv.tile.attention.spec import KEEP_ALL

HIDDEN = -math.inf


@dataclass(frozen=True)
class FlashAttention:
    """An attention, as far as its tensors do not say it. `scale` None is 1/√D. `causal`: row r sees columns
    up to r. `window`: columns nearer to r than so many, on both sides. `kept` of 256 weights are kept, by a
    seed that comes after the mask. `sinks`, the last tensor, are one more logit of each head's softmax.
    `documents`: rows see their document, whose first row and end come in the mask's place."""
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    kept: int = KEEP_ALL
    sinks: bool = False
    documents: bool = False


@dataclass(frozen=True)
class FlashAttentionBackward:
    """The gradients of q, k and v in an attention."""
    forward: FlashAttention


def attend(what: FlashAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
           seed: Tensor | None = None, sinks: Tensor | None = None,
           documents: tuple[Tensor, ...] = ()) -> Tensor:
    """The attention of q [B, H, S_q, D] over k [B, H_kv, S_kv, D] and v [B, H_kv, S_kv, D_v]: out. `mask` is
    bool (true: seen) or of floats (added), broadcast to [B, H, S_q, S_kv]; `seed`, uint32 [2], is that of
    dropout; `sinks` are float32 [H]; `documents` are first and end, int32 [B, S], instead of a mask."""
    more = [*documents, *(one for one in (mask, seed, sinks) if one is not None)]
    what = replace(what, sinks=sinks is not None, documents=bool(documents))
    return named.call(what, forward, q, k, v, *more, grad=_gradient)[0]


def apply_sink(out: Tensor, logs: Tensor, sinks: Tensor) -> Tensor:
    """out [B, H, S_q, D_v] with one more logit of each head that has no value: the sum of weights, exp l,
    grows by exp sink, so that out is multiplied by 1 / (1 + exp(sink − l))."""
    share = (logs == HIDDEN).where(0, (logs - sinks.reshape(1, -1, 1)).sigmoid())
    return (out.float() * share.unsqueeze(-1)).cast(out.dtype)


# **** forward ****

def forward(what: FlashAttention, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """out and l; `more` are the mask, the seed and the sinks, those there are."""
    if what.sinks:
        out, logs = forward(replace(what, sinks=False), q, k, v, *more[:-1])
        return apply_sink(out, logs, more[-1]), _add_in_logs(logs, more[-1])
    mask, kept = _apart(what, (*q.shape[:3], k.shape[2]), more)
    s = scores(what, sums(q, k), q.shape[-1], *mask)
    logs = lse_of(s)
    if kept is None: return weigh_values(what, s, q, v, bool(mask)), logs
    p = (_softmax(what, s.cast(q.dtype), bool(mask)).float() * kept).cast(v.dtype)
    return p @ _for_each(v, q), logs


def _add_in_logs(logs: Tensor, sinks: Tensor) -> Tensor:
    """log (exp l + exp sink)."""
    sinks = sinks.reshape(1, -1, 1)
    top = logs.maximum(sinks)
    base = (top == HIDDEN).where(0, top)
    return ((logs - base).exp() + (sinks - base).exp()).log() + base


def lse_of(s: Tensor) -> Tensor:
    """l of scores: log Σ exp s, −inf where nothing is seen."""
    top = s.max(-1, keepdim=True)
    top = (top == HIDDEN).where(0, top)
    return ((s - top).exp().sum(-1, keepdim=True).log() + top).squeeze(-1)


def _apart(what: FlashAttention, shape: tuple[int, ...],
           more: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The mask, and what weights of a shape are multiplied by; None where nothing is dropped."""
    return (more, None) if what.kept == KEEP_ALL else (more[:-1], keep(more[-1], shape, what.kept))


def weigh_values(what: FlashAttention, s: Tensor, q: Tensor, v: Tensor, masked: bool,
             dropout_p: float = 0.0) -> Tensor:
    """The result, from scores; `masked`: there is a mask among them."""
    return _softmax(what, s.cast(q.dtype), masked).dropout(dropout_p) @ _for_each(v, q)


def _softmax(what: FlashAttention, s: Tensor, masked: bool) -> Tensor:
    """The softmax over columns; a row that sees nothing, which takes a mask or a window, has weights of 0."""
    if not masked and what.window is None: return s.softmax(-1)
    top = s.max(-1, keepdim=True).detach()
    e = (s - (top == HIDDEN).where(0, top)).exp()
    total = e.sum(-1, keepdim=True)
    return e / (total == 0).where(1, total)


def sums(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ, [B, H, S_q, S_kv]."""
    wide = least_upper_dtype(q.dtype, k.dtype, dtypes.float32)
    return q.matmul(_for_each(k, q).transpose(-2, -1), dtype=wide)


def scores(what: FlashAttention, sums: Tensor, d: int, *mask: Tensor) -> Tensor:
    """The scores of q kᵀ."""
    s = sums / math.sqrt(d) if what.scale is None else sums * what.scale
    if what.softcap is not None: s = (s / what.softcap).tanh() * what.softcap
    every = s.const_like(True, dtypes.bool)
    seen = [every.tril()] if what.causal else []
    if what.window is not None:
        seen += [every.triu(1 - what.window), *([] if what.causal else [every.tril(what.window - 1)])]
    if what.documents: mask = own_document(*mask)
    for one in (*seen, *mask): s = s + (one.where(0, HIDDEN) if one.dtype == dtypes.bool else one)
    return s


def own_document(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which columns are not before a row's document, and which not after it, bool [B, 1, S, S]."""
    column = Tensor.arange(int(first.shape[-1])).cast(first.dtype)
    before, after = (one.reshape(-1, 1, int(one.shape[-1]), 1) for one in (first, end))
    return before < column + 1, column < after


def _for_each(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, for each query head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


# **** backward ****

def _gradient(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    """The gradients of an attention's arguments, from those of out and l: tinygrad gives what there are of
    them, a single one with the call behind it."""
    if call is None: *given, call = given  # type: ignore[assignment]
    out = Tensor(call.gettuple(0))
    grads = {len(one.shape): Tensor(one) for one in given}
    grad = grads[4].cast(out.dtype) if 4 in grads else out.zeros_like()
    delta = (grad.float() * out.float()).sum(-1)
    if 3 in grads: delta = delta - grads[3]
    q, k, v, *more = (Tensor(one) for one in call.src[1:])
    what, logs = call.arg.aux, Tensor(call.gettuple(1))
    sinks = [more.pop()] if what.sinks else []
    what, rest = replace(what, sinks=False), (*more, logs, delta, grad)
    made = call_backward(what, q, k, v, *rest)
    masks = [_of_mask(what, q, k, v, *rest) if dtypes.is_float(one.dtype) else None for one in more]
    return (*(one.uop for one in made), *(None if one is None else one.uop for one in masks),
            *(gradient_of_sinks(one, logs, delta).uop for one in sinks))


def call_backward(what: FlashAttention, *arguments: Tensor) -> tuple[Tensor, ...]:
    """dq, dk and dv of an attention without sinks, from the arguments of `backward`."""
    return named.call(FlashAttentionBackward(what), backward, *arguments)


def gradient_of_sinks(sinks: Tensor, logs: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks, which have weights but no values: −Σ exp(sink − l) delta."""
    weight = (logs == HIDDEN).where(0, (sinks.reshape(1, -1, 1) - logs).exp())
    return -(weight * delta).sum((0, 2))


def backward(what: FlashAttentionBackward, q: Tensor, k: Tensor, v: Tensor,
             *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; `rest` is the mask and the seed, those there are, l, delta and the result's gradient."""
    p, ds, slope = _derive_scores(what.forward, q, k, v, *rest)
    grad = rest[-1]
    p, ds = p.cast(v.dtype), (ds * slope).cast(q.dtype)
    dq = (ds.float() @ _for_each(k, q).float()).cast(q.dtype)
    dk, dv = (_sum_query_heads(of, rows, one) for of, rows, one in ((ds, q, k), (p, grad, v)))
    return dq, dk, dv


def _derive_scores(what: FlashAttention, q: Tensor, k: Tensor, v: Tensor,
             *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p after dropout, ds, and the scores' derivative by q kᵀ, all [B, H, S_q, S_kv] in float32."""
    *more, logs, delta, grad = rest
    mask, kept = _apart(what, (*q.shape[:3], k.shape[2]), tuple(more))
    total = sums(q, k)
    s = scores(what, total, q.shape[-1], *mask)
    # where l is -inf too, the difference is NaN
    hidden = s == HIDDEN
    p = hidden.where(0, (s - logs.unsqueeze(-1)).exp())
    # products of halves are not rounded: what is left of dp - delta may be much smaller than both
    dp = grad.float() @ _for_each(v, q).float().transpose(-2, -1)
    scale = 1 / math.sqrt(q.shape[-1]) if what.scale is None else what.scale
    slope = total.const_like(scale)
    if what.softcap is not None:
        capped = (total * (scale / what.softcap)).tanh()
        slope = scale * (1 - capped * capped)
    if kept is not None: dp = dp * kept
    return p if kept is None else p * kept, hidden.where(0, p * (dp - delta.unsqueeze(-1))), slope


def _sum_query_heads(of: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """ofᵀ rows, summed over the query heads of each key head: the gradient of keys or values `like`."""
    b, heads, s_kv, d = like.shape
    of = of.reshape(b, heads, -1, s_kv)
    rows = rows.reshape(b, heads, -1, d)
    return (of.float().transpose(-2, -1) @ rows.float()).cast(like.dtype)


def _of_mask(what: FlashAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
    """The gradient of a mask of floats, the first of what comes after v."""
    _, ds, _ = _derive_scores(what, q, k, v, mask, *rest)
    axes = tuple(i for i, (own, all_) in enumerate(zip(mask.shape, ds.shape, strict=True)) if own != all_)
    return ds.sum(axes, keepdim=True).cast(mask.dtype)


named.lower(FlashAttention, "flash attention", lazy_import("tinygrad_nv.patterns.attention.lower:forward"),
            "NV_ATTENTION", sees_uses=True)
named.lower(FlashAttentionBackward, "flash attention backward",
            lazy_import("tinygrad_nv.patterns.attention.lower_backward:backward"), "NV_ATTENTION")


def draw_seed(device: str | tuple[str, ...] | None) -> Tensor:
    """A new seed, uint32 [2], by tinygrad's generator: another one in every run of a captured graph."""
    halves = Tensor.randint(2, 2, high=1 << 16, device=device).cast(dtypes.uint32)
    return (halves[0] * (1 << 16) + halves[1]).contiguous()


def keep(seed: Tensor, shape: tuple[int, ...], kept: int) -> Tensor:
    """Returns the factors of weights of a shape [..., rows, columns]: 256 / kept, or 0 where they are
    dropped; float32."""
    *batch, rows, columns = shape
    matrices, groups = 1, -(-columns // SPAN)
    for extent in batch: matrices *= extent

    def along(axis: int, extent: int) -> Tensor:
        shape = [extent if i == axis else 1 for i in range(4)]
        return Tensor.arange(extent).cast(dtypes.uint64).reshape(shape)
    call = along(2, groups) * 4 + along(3, 4)
    key = seed.cast(dtypes.uint64)
    words = philox((along(1, rows), call, along(0, matrices), along(1, rows) * 0), (key[0], key[1]))
    wide = [word.expand(matrices, rows, groups, 4).contiguous() for word in words]
    # byte 4w + 2b + e of call q is of column 16w + 8b + 2q + e
    stacked = [[[(word >> (16 * b + 8 * e)) & 0xFF for e in range(2)] for b in range(2)] for word in wide]
    found = Tensor.stack(*(Tensor.stack(*(Tensor.stack(*pair, dim=-1) for pair in each), dim=3)
                           for each in stacked), dim=3)
    found = found.reshape(matrices, rows, groups * SPAN)[:, :, :columns].reshape(shape)
    # a kernel of its own: what uses it would compute it for each of its uses
    return (found < kept).contiguous().where(KEEP_ALL / kept, 0.0).cast(dtypes.float32)
