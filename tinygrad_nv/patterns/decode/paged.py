"""Attention over keys and values in pages, as a function known by name.

Protocol. `paged_attention(q, k_pages, v_pages, table, lengths)` is a FUNCTION whose body (paged_reference.py)
is plain tinygrad: the reference, and what runs on any device; paged_lower.py makes kernels of it. Request b
has `lengths[b]` tokens, the new rows among them: row i of q stands at place t = lengths[b] − S_q + i, and
sees keys 0 … t. Key c of the request lies in page `table[b, c // page_size]`, as token c % page_size of it.
For query head h, whose key head is h // (H / H_kv):

    s[i, c]   = scale · Σ_d q[i, d] k[c, d]                    float32; cap · tanh(s / cap) with `softcap`
    p[i, c]   = softmax of s over the keys that row i sees     rounded to q's dtype
    out[i, d] = Σ_c p[i, c] v[c, d]                            float32, then rounded to q's dtype

`window` counts the row's own key; with `chunked` keys are in chunks of so many, of which a row sees its own.
`sinks[h]` is one more logit of each softmax, which no key has (attention sinks). With scales, one for each
page and key head, keys and values stand for their numbers times these, and p is rounded after it has been
multiplied by the scale of its value.

Everything is read from memory by each launch: one captured TinyJit or GraphPool serves any length up to the
table's. Entries of the table, pages and tokens that no row sees may hold anything: nothing of them gets into
a result, NaN neither. Rows that see nothing are zeros: all of a request of length 0, and the first rows of a
request that is shorter than S_q. What a table and lengths cannot be is not looked for, but with NV_DEBUG=1
(paged_check.py).

`latent_attention` is attention over latents in pages: multi-head latent attention (MLA), absorbed. A latent
cache has one vector for each token, of which all query heads compute keys and values (DeepSeek-V2, arXiv
2405.04434): the rotated key that they share, then the latent. Head h has the keys W_K[h] latent and the
values W_V[h] latent, so that with queries multiplied by W_K[h]ᵀ beforehand

    s[i, c]   = scale · (q_rope[i] · rope[c] + (W_K[h]ᵀ q[i]) · latent[c])
    out[i]    = W_V[h] Σ_c p[i, c] latent[c]

attention never computes keys or values. `latent_attention(q, pages, table, lengths)` is what lies between
the two matrices: paged attention of one key head whose values are the last elements of its keys.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import isfinite

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.decode.paged_check import Limits, check_pages_used
from tinygrad_nv.patterns.decode.paged_lower import NAME, lower_paged
from tinygrad_nv.patterns.decode.paged_reference import PagedAttention, attend_paged
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.expression import short

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, *,
                    scale: float | None = None, window: int | None = None, softcap: float | None = None,
                    k_scale: Tensor | None = None, v_scale: Tensor | None = None, chunked: bool = False,
                    sinks: Tensor | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v of the newest S_q rows of each request: [B, S_q, H, D_v] in q's dtype.

    q [B, S_q, H, D]; k_pages [P, page_size, H_kv, D], v_pages [P, page_size, H_kv, D_v]; table int32
    [B, pages]; lengths int32 [B], with the new rows. Keys and values are of q's dtype, or of 8 bits with
    k_scale and v_scale, float32 [P, H_kv]. They may be parts of one tensor. `scale` is 1/√D by default.
    `sinks` are float32 [H].
    Raises `SpecError`."""
    given = _check_tensors(q, k_pages, v_pages, table, lengths, k_scale, v_scale)
    if window is not None and (type(window) is not int or window < 1):
        raise SpecError(f"window={window}", "a number, at least the row's own key: 1")
    if chunked and window is None: raise SpecError("chunked without a window", "window: the size of a chunk")
    if softcap is not None and not (isfinite(softcap) and softcap > 0):
        raise SpecError(f"softcap={softcap}", "a finite number above 0", "leave it out for no cap")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not isfinite(scale): raise SpecError(f"scale={scale}", "a finite number")
    limits = Limits("paged_attention", int(k_pages.shape[0]), int(k_pages.shape[1]), int(q.shape[1]),
                    window or 0)
    given[3:5] = check_pages_used(limits, table, lengths)
    if sinks is not None:
        check_shape("sinks", sinks, "H", (q.shape[2],))
        check_kind("sinks", sinks.dtype, (dtypes.float32,))
        given.append(sinks)
    what = PagedAttention(scale, window, softcap, chunked, sinks is not None)
    return call(what, attend_paged, *given)[0]


# **** what is refused ****

def _check_tensors(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor,
             k_scale: Tensor | None, v_scale: Tensor | None) -> list[Tensor]:
    """The tensors of a call. Raises `SpecError` where they do not fit each other."""
    check_shape("q", q, "B, S_q, H, D", (None,) * 4)
    check_pages(k_pages, v_pages)
    batch, _, heads, d = q.shape
    pages, _, kv_heads, width = k_pages.shape
    if width != d:
        raise SpecError(f"q of {d} elements a head, keys of {width}", "as many for both")
    if heads % kv_heads:
        raise SpecError(f"{heads} query heads over {kv_heads} key heads",
                        "a multiple: each key head serves as many query heads",
                        "correct the reshape of q or of the pages")
    check_shape("table", table, "B, pages", (batch, None))
    check_shape("lengths", lengths, "B", (batch,))
    check_kind("q", q.dtype, FLOATS)
    for name, x in (("table", table), ("lengths", lengths)): check_kind(name, x.dtype, (dtypes.int32,))
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)): check_kind(name, x.dtype, (q.dtype, *BYTES))
    scales = check_scales([k_pages, v_pages], [k_scale, v_scale], (pages, kv_heads))
    return [q, k_pages, v_pages, table, lengths, *scales]


def check_pages(k_pages: Tensor, v_pages: Tensor | None = None) -> None:
    """Raises `SpecError` for pages of keys and of values that differ in more than d."""
    check_shape("k_pages", k_pages, "P, page_size, H_kv, D", (None,) * 4)
    if v_pages is None: return
    check_shape("v_pages", v_pages, "P, page_size, H_kv, D_v", (*k_pages.shape[:3], None))
    if k_pages.dtype != v_pages.dtype:
        raise SpecError(f"keys of {short(k_pages.dtype)}, values of {short(v_pages.dtype)}",
                        "one dtype for both")


def check_scales(pages: Sequence[Tensor], scales: Sequence[Tensor | None],
                 shape: tuple[int | None, ...]) -> list[Tensor]:
    """The scales of keys and of values, where pages of 8 bits have them. Raises `SpecError`."""
    made = []
    for name, each, scale in zip_longest(("k_scale", "v_scale"), pages, scales):
        if (scale is None) == (each is not None and each.dtype in BYTES):
            kind = "no values" if each is None else short(each.dtype)
            raise SpecError(f"{'no ' if scale is None else ''}{name} with {kind}",
                            "scales with keys and values of 8 bits, and only then")
        if scale is None: continue
        check_shape(name, scale, "P, H_kv", shape)
        check_kind(name, scale.dtype, (dtypes.float32,))
        made.append(scale)
    return made


def check_shape(name: str, x: Tensor, words: str, wanted: tuple[int | None, ...]) -> None:
    """Raises `SpecError` for what is no tensor, or of another shape; None is any extent, at least 1."""
    if not isinstance(x, Tensor): raise SpecError(f"{name}, a {type(x).__name__}", f"a Tensor [{words}]")
    fits = len(x.shape) == len(wanted) and all(
        isinstance(have, int) and have > 0 and want in (None, have)
        for have, want in zip(x.shape, wanted, strict=True))
    if fits: return
    shown = ", ".join("any" if want is None else str(want) for want in wanted)
    raise SpecError(f"{name} of shape {tuple(x.shape)}", f"[{words}]: ({shown}{',' * (len(wanted) == 1)})",
                    "extents are numbers: pad a batch of varying size" if len(x.shape) == len(wanted) else "")


def check_kind(name: str, dtype: DType, kinds: tuple[DType, ...]) -> None:
    """Raises `SpecError` for another dtype."""
    if dtype in kinds: return
    names, one = ", ".join(map(short, kinds)), len(kinds) == 1
    raise SpecError(f"{name} of {short(dtype)}", names if one else f"one of {names}",
                    f"{name}.cast({kinds[0] if one else '…'})")


lower(PagedAttention, NAME, lower_paged, "NV_ATTENTION")


def latent_attention(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, *, value_dim: int,
                     scale: float | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v of the newest S_q rows of each request, v the last `value_dim` elements of k:
    [B, S_q, H, value_dim] in q's dtype.

    q [B, S_q, H, D] absorbed; pages [P, page_size, 1, D]; table int32 [B, pages]; lengths int32 [B], with the
    new rows. `scale` is 1/√D by default. Raises `SpecError`."""
    check_shape("pages", pages, "P, page_size, 1, D", (None, None, 1, None))
    width = int(pages.shape[-1])
    if type(value_dim) is not int or not 0 < value_dim <= width:
        raise SpecError(f"value_dim={value_dim}", f"1 to {width}, the elements of a token")
    return paged_attention(q, pages, pages[..., width - value_dim:], table, lengths, scale=scale)
