"""New keys and values into pages, as a function known by name.

Protocol. `kv_append(k_pages, v_pages, k, v, table, lengths)` writes the T newest tokens of each request into
its pages, in place: k and v are [B, T, H_kv, D], and row t stands at place lengths[b] − T + t. Lengths count
the new tokens, as for the `paged_attention` that follows, which sees what has been written in the same step.
With `cos` and `sin` keys are rotated on their way, and with `q` queries too. What exactly is written:
tile/kv_append/spec.py. Its body (reference.py there) is the reference, and what runs wherever no kernel does.

Like `Tensor.assign` it changes the Tensors of the pages, and is done when they, or what is made of them, are
realized; keys and values are then written together. Padding: a row before the request's first token (length
0), or one whose page is none (−1), writes nothing: a batch may be filled up with requests of length 0. A
scrap page needs no special care either, as long as no two rows share a token of it.

Without values (`v_pages` and `v` are None) there are keys alone: a latent cache (decode/paged.py).

Without a table the cache is contiguous, [B, H_kv, capacity, D] of a request each, as attention over slices of
it reads it; all else is the same.

The kernel writes pages that are Tensors of their own. Parts of a larger one (`cache[layer]`, `cache[:, 0]`)
are written in place too, but by tinygrad's kernels, which go through all of it.

Pages of 8 bits have scales, one for each page and key head, that the caller has set before: they are those
that `paged_attention` gets, and appending never changes them, since tokens that are already in a page would
mean other numbers. A head whose values go beyond 127 scales (s8), 448 (e4m3) or 57344 (e5m2) saturates.
Scales that are the same for all pages, found once for a model, are `scale.expand(P, H_kv).contiguous()`.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.decode.paged import FLOATS, check_kind, check_pages, check_scales, check_shape
from tinygrad_nv.patterns.decode.paged_check import Limits, check_pages_used
from tinygrad_nv.patterns.kv_append.lower import NAME, lower_kv_append
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.kv_append.reference import KVAppend, append


def kv_append(k_pages: Tensor, v_pages: Tensor | None, k: Tensor, v: Tensor | None, table: Tensor | None,
              lengths: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None,
              q: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
              interleaved: bool = False, rounded: bool = False) -> tuple[Tensor, ...]:
    """Writes new keys and values into their pages, in place as `Tensor.assign` does. Returns k_pages and
    v_pages, if there are any, and the rotated q if there is one: [B, T, H, D], in its dtype.

    k_pages [P, page_size, H_kv, D], v_pages [P, page_size, H_kv, D_v]; k [B, T, H_kv, D], v [B, T, H_kv,
    D_v]; table int32 [B, pages]; lengths int32 [B], with the new tokens; q [B, T, H, D]. cos and sin
    [places, rotated / 2], of at least as many places as the table has; pairs are i and i + rotated / 2, or
    2i and 2i + 1 if `interleaved`; `rounded` rounds each product and sum of the rotation, as operations on
    tensors of k's dtype do, which cos and sin must have too. Without a table keys are a contiguous cache
    [B, H_kv, capacity, D], values [B, H_kv, capacity, D_v]. Raises `SpecError`."""
    if (v is None) != (v_pages is None):
        raise SpecError(f"{'v_pages' if v is None else 'v'} alone", "v and v_pages, or neither")
    pages, new = ([each for each in pair if each is not None] for pair in ((k_pages, v_pages), (k, v)))
    check_pages(*pages)
    stored, *extents, d = k_pages.shape
    size, heads = extents if table is not None else extents[::-1]
    check_shape("k", k, "B, T, H_kv, D", (None, None, heads, d))
    batch, rows = k.shape[:2]
    if v is not None: check_shape("v", v, "B, T, H_kv, D_v", (batch, rows, heads, pages[1].shape[3]))
    if table is not None: check_shape("table", table, "B, pages", (batch, None))
    elif stored != batch:
        raise SpecError(f"a cache of {stored} requests, rows of {batch}", "as many", "slice the cache")
    check_shape("lengths", lengths, "B", (batch,))
    for name, x in zip(("k", "v"), new, strict=False): check_kind(name, x.dtype, FLOATS)
    for name, x in (("table", table), ("lengths", lengths)):
        if x is not None: check_kind(name, x.dtype, (dtypes.int32,))
    check_kind("k_pages", k_pages.dtype, (*FLOATS, *BYTES))
    scales = check_scales(pages, [k_scale, v_scale], (stored, heads))
    rope = _rope(cos, sin, int(d), int(size) * (1 if table is None else int(table.shape[1])))
    if q is not None:
        check_shape("q", q, "B, T, H, D", (batch, rows, None, d))
        check_kind("q", q.dtype, FLOATS)
        if not rope: raise SpecError("q without cos and sin", "both, by which q is rotated", "leave q out")
    if rounded: check_rounded(k, q, rope)
    if table is not None:
        limits = Limits("kv_append", int(stored), int(size), int(rows), holes=True)
        table, lengths = check_pages_used(limits, table, lengths)
    given = [*pages, *new, *([] if table is None else [table]), lengths, *rope,
             *([] if q is None else [q]), *scales]
    what = KVAppend(bool(rope), interleaved, q is not None, bool(scales), table is not None, rounded,
                    v is not None)
    made = call(what, append, *given)
    return *(old.assign(one) for old, one in zip(pages, made, strict=False)), *made[len(pages):]


def check_rounded(k: Tensor, q: Tensor | None, rope: list[Tensor]) -> None:
    """Raises `SpecError` for a rotation that cannot be rounded at each step: of no dtype of its own."""
    if not rope: raise SpecError("rounded=True without cos and sin", "both, by which rows are rotated")
    for name, x in (("q", q), ("cos", rope[0])):
        if x is not None: check_kind(name, x.dtype, (k.dtype,))


def _rope(cos: Tensor | None, sin: Tensor | None, d: int, longest: int) -> list[Tensor]:
    """cos and sin, where there are both. Raises `SpecError`."""
    if cos is None and sin is None: return []
    if cos is None or sin is None:
        raise SpecError(f"{'sin' if cos is None else 'cos'} alone", "cos and sin, or neither")
    check_shape("cos", cos, "places, rotated / 2", (None, None))
    check_shape("sin", sin, "places, rotated / 2", tuple(cos.shape))
    check_kind("cos", cos.dtype, FLOATS)
    check_kind("sin", sin.dtype, (cos.dtype,))
    places, half = cos.shape
    if 2 * half > d: raise SpecError(f"cos of {half} pairs", f"at most {d // 2}, of heads of {d} elements")
    if places < longest:
        raise SpecError(f"cos of {places} places, a table of {longest} tokens", "as many places at least",
                        "make longer tables of cos and sin, or a block table of fewer pages")
    return [cos, sin]


lower(KVAppend, NAME, lower_kv_append, "NV_ATTENTION")
