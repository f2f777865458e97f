"""Attention of sequences of varying length that lie one after the other, as a function known by name.

Protocol. `varlen_attention(q, k, v, cu_q, cu_k, most_q, most_k)` is a FUNCTION whose body
(varlen_reference.py) is plain tinygrad: the reference, and what runs on any device; varlen_lower.py makes a
kernel of it. Where rows and keys are the same tokens (cu_q and cu_k are one tensor) the gradient is that of
documents, by a kernel; else, and of `distances`, it is the body's.

Sequence b has rows cu_q[b] … cu_q[b + 1] − 1 of q and cu_k[b] … cu_k[b + 1] − 1 of k and v. Its row i stands
at place t = i + (its keys − its rows), so that the last row stands at the last key (as in FlashAttention
2.1). For query head h, whose key head is h // (H / H_kv), over the keys c that row i sees:

    s[i, c]   = scale · Σ_d q[i, d] k[c, d]                    float32; cap · tanh(s / cap) with `softcap`
              + distances[h, L − 1 + c − i]                    with `distances` [H, 2 L − 1]
    p[i, c]   = softmax of s                                   rounded to q's dtype
    out[i, d] = Σ_c p[i, c] v[c, d]                            float32, then rounded to q's dtype

The arrays are read from memory by each launch: one captured TinyJit serves any lengths up to `most_q` and
`most_k`. Nothing of a sequence gets into another's result, NaN neither. Rows that see nothing, and rows after
the last sequence's, are zeros.

`document_attention` is attention within documents that lie one after the other in rows of tokens: what packed
training computes. A row has S tokens. Token r belongs to tokens first[r] … end[r] − 1 of its row, its
document, and sees those alone, up to itself with `causal`:

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
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.attention.named import FlashAttention, attend, call_backward, gradient_of_sinks
from tinygrad_nv.patterns.attention.varlen_lower import NAME, lower_varlen
from tinygrad_nv.patterns.attention.varlen_reference import VarlenAttention, attend_varlen, token_bounds
from tinygrad_nv.patterns.decode.paged import FLOATS, check_kind, check_shape
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.tile.attention.spec import Band


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, *,
                     causal: bool = False, window: int | None = None, scale: float | None = None,
                     softcap: float | None = None, distances: Tensor | None = None,
                     sinks: Tensor | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v of each sequence: [rows, H, D_v] in q's dtype.

    q [rows, H, D], k [keys, H_kv, D], v [keys, H_kv, D_v] of one dtype; cu_q and cu_k int32 [sequences + 1],
    from 0 on, never falling. `most_q` and `most_k` are at least the rows and keys of any sequence; what is
    longer is cut off. `causal`: a row sees keys up to its place, the last row the last key. `window`: fewer
    than so many keys away from it. `scale` is 1/√D by default. `distances`, float32 [H, 2 L − 1], are added
    to scores by how far a key is from its row (relative position biases, as T5 and MPNet have them): L is at
    least `most_q`, and cu_q and cu_k are one tensor. `sinks`, float32 [H], are one more logit of each head's
    softmax, of no value. Raises `SpecError`."""
    _check(q, k, v, cu_q, cu_k)
    for name, most in (("most_q", most_q), ("most_k", most_k)):
        if type(most) is not int or most < 1: raise SpecError(f"{name}={most!r}", "a number, at least 1")
    if window is not None and (type(window) is not int or window < 1):
        raise SpecError(f"window={window}", "a number, at least the row's own key: 1")
    if softcap is not None and not (isfinite(softcap) and softcap > 0):
        raise SpecError(f"softcap={softcap}", "a finite number above 0", "leave it out for no cap")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not isfinite(scale): raise SpecError(f"scale={scale}", "a finite number")
    first = None if window is None else 1 - window
    last = 0 if causal else None if window is None else window - 1
    most_q, most_k = min(most_q, q.shape[0]), min(most_k, k.shape[0])
    more = []
    if sinks is not None:
        check_shape("sinks", sinks, "H", (q.shape[1],))
        check_kind("sinks", sinks.dtype, (dtypes.float32,))
        more.append(sinks)
    if distances is not None:
        _check_distances(distances, q.shape[1], max(most_q, most_k), cu_q is cu_k)
        more.append(distances)
    what = VarlenAttention(most_q, most_k, Band(first, last), scale, softcap, sinks is not None)
    same = cu_q is cu_k and q.shape[0] == k.shape[0] and most_q == most_k and distances is None
    return call(what, attend_varlen, q, k, v, cu_q, cu_k, *more, grad=_gradient if same else None)[0]


def _gradient(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    """The gradients of q, k, v and sinks, from that of the result: tinygrad gives a single one with the call
    behind it."""
    grad, node = given if call is None else (given[0], call)
    what, (q, k, v, cu, _, *sinks) = node.arg.aux, map(Tensor, node.src[1:])
    out, logs = (Tensor(node.gettuple(i)) for i in range(2))
    rows = Tensor(grad).cast(out.dtype)
    delta, logs = ((rows.float() * out.float()).sum(-1).transpose(0, 1).unsqueeze(0), logs.unsqueeze(0))
    band = what.band
    attention = FlashAttention(band.last == 0, what.scale, what.softcap,
                               None if band.first is None else 1 - band.first, documents=True)
    operands = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, rows)]
    made = call_backward(attention, *operands[:3], *token_bounds(cu, what.most_q, int(q.shape[0])), logs,
                         delta, operands[3])
    return (*(x[0].transpose(0, 1).uop for x in made), None, None,
            *(gradient_of_sinks(x, logs, delta).uop for x in sinks))


def _check_distances(x: Tensor, heads: int, most: int, one: bool) -> None:
    """Raises `SpecError` for biases that do not fit."""
    check_shape("distances", x, "H, 2 L - 1", (heads, None))
    check_kind("distances", x.dtype, (dtypes.float32,))
    if not x.shape[1] % 2 or x.shape[1] < 2 * most - 1:
        raise SpecError(f"distances of {x.shape[1]} numbers for each head",
                        f"an odd number, at least {2 * most - 1}: distances from {1 - most} to {most - 1}")
    if not one: raise SpecError("distances, with other keys than rows", "cu_q and cu_k of one tensor")


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Raises `SpecError` for tensors that do not fit each other."""
    check_shape("q", q, "rows, H, D", (None,) * 3)
    check_shape("k", k, "keys, H_kv, D", (None, None, q.shape[2]))
    check_shape("v", v, "keys, H_kv, D_v", (*k.shape[:2], None))
    check_kind("q", q.dtype, FLOATS)
    for name, x in (("k", k), ("v", v)): check_kind(name, x.dtype, (q.dtype,))
    if q.shape[1] % k.shape[1]:
        raise SpecError(f"{q.shape[1]} query heads over {k.shape[1]} key heads", "a multiple: each key head "
                        "serves as many query heads", "repeat key heads, or correct the reshape of q or of k")
    check_shape("cu_q", cu_q, "sequences + 1", (None,))
    check_shape("cu_k", cu_k, "sequences + 1", cu_q.shape)
    if cu_q.shape[0] < 2:
        raise SpecError(f"cu_q of shape {cu_q.shape}", "where each sequence begins, and where the last ends")
    for name, x in (("cu_q", cu_q), ("cu_k", cu_k)): check_kind(name, x.dtype, (dtypes.int32,))


lower(VarlenAttention, NAME, lower_varlen, "NV_ATTENTION", sees_uses=True)


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
