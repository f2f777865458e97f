"""Specs of appends: new keys and values of each request, rotated and rounded, into its pages.

Protocol. Request b has `length[b]` tokens with its new ones: row t of `rows` stands at place p = length[b] −
rows + t, which is token p % page_size of page `table[b, p // page_size]`. For each key head h:

    k_pages[page, token, h] = rounded(rotate(k[b, t, h], p))
    v_pages[page, token, h] = rounded(v[b, t, h])
    q_out[b, t, h]          = rounded(rotate(q[b, t, h], p))           for each query head, where there is q

Without v there are no values: a latent cache has keys alone.

    rotate(x, p)[i]         = x[i] cos[p, i] − x[j] sin[p, i]          of pairs (i, j): i and i + half, or of
    rotate(x, p)[j]         = x[j] cos[p, i] + x[i] sin[p, i]          interleaved ones 2i and 2i + 1

in float32; elements from 2 · half on stay as they are. Where rows and tables are of one dtype the rotation
may be `rounded`: each product and each sum to that dtype, as of tensors. Numbers of 8 bits (s8, e4m3, e5m2)
are x · (1 / scale) of the page and key head, to the nearest, ties to even; what is too large, infinities too,
becomes the largest number there is.

A row before the request's first token, beyond its table, or with a page that is not one (below 0, or not
below `stored`), writes no keys and no values: padding. Its q is rotated as at the nearest place of the table.
No two rows may have one token. Without a table, in a contiguous cache, page b is all of request b. Table and
lengths are int32 in memory, read by each launch; cos and sin are dense [places, half], q_out [batch, rows,
heads, d]. Strides are in elements.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.decode.spec import BYTES, Pages, Scales
from tinygrad_nv.tile.expression import short

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


@dataclass(frozen=True)
class Heads:
    """New rows: element d of head h of row t of request b lies at offset + request · b + row · t + head · h +
    d."""
    dtype: DType
    request: int
    row: int
    head: int
    offset: int = 0

    @property
    def alignment_bytes(self) -> int:
        """The power of two, at most 16, of which every head's beginning is a multiple."""
        most = 16
        numbers = (self.request, self.row, self.head, self.offset)
        while any(number * self.dtype.itemsize % most for number in numbers): most //= 2
        return most


@dataclass(frozen=True)
class Rope:
    """A rotation of `half` pairs, by tables of a dtype; `rounded` to it at each step."""
    dtype: DType
    half: int
    interleaved: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class AppendSpec:
    """An append of `rows` tokens to each of `batch` requests, whose tables have `pages` of `stored` pages. A
    contiguous cache (without `table`) has one page for each request, of any size: page b is request b's.
    Without values `d_v` is 0."""
    batch: int
    rows: int
    heads: int
    d: int
    d_v: int
    page_size: int
    pages: int
    stored: int
    k: Heads
    v: Heads | None
    k_pages: Pages
    v_pages: Pages | None
    rope: Rope | None = None
    q: Heads | None = None
    q_heads: int = 0
    k_scale: Scales | None = None
    v_scale: Scales | None = None
    table: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "rows", "heads", "d", "page_size", "pages", "stored"):
            if getattr(self, name) < 1: raise SpecError(f"{name}={getattr(self, name)}", "an extent ≥ 1")
        if (self.v is None) != (self.v_pages is None) or (self.v is None) != (self.d_v == 0):
            raise SpecError(f"values of {self.d_v} elements", "rows and pages of at least 1, or neither")
        if (self.q is None) != (self.q_heads == 0) or (self.q is not None and self.rope is None):
            raise SpecError(f"q of {self.q_heads} heads", "q with heads and a rotation, or none")
        if self.rope is not None and not 2 <= 2 * self.rope.half <= self.d:
            raise SpecError(f"a rotation of {2 * self.rope.half} elements of {self.d}", f"2 to {self.d}")
        if not self.table and (self.pages, self.stored) != (1, self.batch):
            raise SpecError(f"{self.pages} of {self.stored} pages without a table", "a page for each request")
        if self.rope is not None and self.rope.rounded:
            for x in (self.k, *([self.q] if self.q else [])):
                if x.dtype == self.rope.dtype: continue
                raise SpecError(f"a rotation rounded to {short(self.rope.dtype)} of {short(x.dtype)}",
                                "one dtype for rows, cos and sin")
        given = [each.dtype for each in (self.k, self.v, self.q, self.rope) if each is not None]
        for dtype in given:
            if dtype not in FLOATS: raise SpecError(f"rows of {short(dtype)}", "a float of 16 or 32 bits")
        for pages, scale in ((self.k_pages, self.k_scale), (self.v_pages, self.v_scale)):
            if pages is None:
                if scale is None: continue
                raise SpecError("scales of values without values", "neither, or both")
            if pages.dtype not in (*FLOATS, *BYTES): raise SpecError(f"pages of {short(pages.dtype)}",
                                                                     "floats, or 8 bits with scales")
            if (scale is None) == (pages.dtype in BYTES):
                raise SpecError(f"{'no ' if scale is None else ''}scales with {short(pages.dtype)}",
                                "scales with pages of 8 bits, and only then")

    @property
    def longest(self) -> int:
        """Tokens of a request at most."""
        return self.pages * self.page_size

    def __str__(self) -> str:
        words = [f"append {self.batch}x{self.rows}", f"{self.heads} heads",
                 f"d {self.d}" if self.d_v in (0, self.d) else f"d {self.d}/{self.d_v}",
                 f"{short(self.k.dtype)} → {short(self.k_pages.dtype)}",
                 f"pages of {self.page_size}" if self.table else f"contiguous, ≤{self.page_size}"]
        if self.rope is not None:
            words.append(f"rope {2 * self.rope.half}" + (" interleaved" if self.rope.interleaved else "")
                         + (" rounded" if self.rope.rounded else ""))
        if self.q is not None: words.append(f"q of {self.q_heads} heads")
        if self.v is None: words.append("no values")
        return ", ".join(words)
