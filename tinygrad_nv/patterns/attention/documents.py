"""Attention within documents that lie one after the other in rows of tokens: what packed training computes.

Protocol. A row has S tokens. Token r belongs to tokens first[r] … end[r] − 1 of its row, its document, and
sees those alone, up to itself with `causal`:

    s[r, c]    = cap · tanh(scale · (q kᵀ)[r, c] / cap)    where first[r] ≤ c < end[r] and the band allows it
    out        = softmax(s) v                              as FlashAttention (named.py), with its gradient

All tokens of a document have its bounds; documents stand in order. Tokens of none, as padding, have first =
end: their results and gradients are 0, and nothing depends on their q, k, v and gradient (on GPUs, as long
as these are finite). Kernels skip what lies between documents: time follows Σ length², memory
S. The bounds are read from memory: one captured step serves all documents.
"""
from __future__ import annotations

from math import isfinite

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.attention.named import FlashAttention, attend
from tinygrad_nv.patterns.decode.paged import FLOATS, check_kind, check_shape


def document_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, *, causal: bool = True,
                       window: int | None = None, scale: float | None = None, softcap: float | None = None,
                       sinks: Tensor | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v within documents: [B, H, S, D_v] in q's dtype.

    q [B, H, S, D], k [B, H_kv, S, D], v [B, H_kv, S, D_v] of one dtype; H is a multiple of H_kv. `first` and
    `end`, int32 [B, S], are of each token where its document begins and ends in its row. `causal`: a token
    sees those up to itself. `window`: fewer than so many tokens away. `scale` is 1/√D by default; `softcap`
    makes scores cap · tanh(s / cap). `sinks`, float32 [H], are one more logit of each head's softmax, of no
    value. Raises `SpecError`."""
    check_shape("q", q, "B, H, S, D", (None,) * 4)
    batch, heads, tokens, d = q.shape
    check_shape("k", k, "B, H_kv, S, D", (batch, None, tokens, d))
    check_shape("v", v, "B, H_kv, S, D_v", (*k.shape[:3], None))
    check_kind("q", q.dtype, FLOATS)
    for name, x in (("k", k), ("v", v)): check_kind(name, x.dtype, (q.dtype,))
    if heads % k.shape[1]:
        raise SpecError(f"{heads} query heads over {k.shape[1]} key heads", "a multiple: each key head "
                        "serves as many query heads", "repeat key heads, or correct the reshape of q or of k")
    for name, x in (("first", first), ("end", end)):
        check_shape(name, x, "B, S", (batch, tokens))
        check_kind(name, x.dtype, (dtypes.int32,))
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not (isfinite(number) and (number > 0 or name == "scale")):
            raise SpecError(f"{name}={number}", "a finite number" + " above 0" * (name == "softcap"))
    if window is not None and (type(window) is not int or window < 1):
        raise SpecError(f"window={window}", "a number, at least the row's own key: 1")
    if sinks is not None:
        check_shape("sinks", sinks, "H", (heads,))
        check_kind("sinks", sinks.dtype, (dtypes.float32,))
    what = FlashAttention(causal, scale, softcap, window)
    return attend(what, q, k, v, sinks=sinks, documents=(first, end))
