"""Specs of decode attention: a few new rows of each request over its keys and values.

Protocol. Request b has `length[b]` tokens; the last `s_q` of them are its rows: row i stands at place
t = length[b] − s_q + i; all of them at the last, length[b] − 1, where `causal` is not set. Key c of the
request lies in page `table[b, c // page_size]`, as token c % page_size of it; without a table, in a
contiguous cache, page b is all of request b. For each request b, key head h and query head g of that key
head:

    sum[i, c]  = Σ_d q[i, d] k[c, d]                                      float32
    s[i, c]    = score(sum[i, c])     for c ≤ t, and c > t − window; else −inf
    l[i]       = log (Σ_c exp s[i, c] + exp sink)                         the sink only with `sinks`
    p[i, c]    = exp(s[i, c] − l[i])                                      rounded to q's dtype
    out[i, d]  = Σ_c p[i, c] v[c, d]                                      float32, then rounded to out's dtype

`score` is an expression (tile/expression.py) of the sum in float32: `Position("m")` is the row's place t,
`Position("n")` the key c, `Position("start")` is length[b] − s_q, `Position(0)` the request, 1 the key head,
2 the query head of it. Loads have the strides of row i, key c, and the three of the batch; with a table
there are none. Rows that see nothing, as all of a request of length 0, give zeros.

With `chunked` keys are in chunks of `window`, of which a row sees its own: c ≥ t − t mod window. `sinks` are
float32 [key heads, group] in memory, a logit of each query head (attention sinks, arXiv 2309.17453): weights
add up to less than 1. A sink of −inf is none.

Keys and values of 8 bits (e4m3, e5m2, s8) stand for their number times a scale, float32 in memory, one for
each page and key head: p is then rounded after it has been multiplied by the scale of its value. NaN of e4m3
counts as 480, and on a GPU infinity and NaN of e5m2 as 2^16 and more beside q of bf16.

The table (int32 [batch, pages], dense) is read from memory by each launch, and so are the lengths (int32
[batch], at most pages · page_size) where `length` is "memory". "argument" is one length of all requests, an
integer of the launch; "most" is the longest. Nothing is read of pages, entries of the table, tokens and
parameters of the score that no row sees.

With `latent` values are elements of keys, in the memory of keys (MLA): `v` says where they lie there, and
there is no pointer of values.

Strides are in elements; along d elements lie side by side.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.spec import OPERANDS, Rows
from tinygrad_nv.tile.expression import Expression, Position, Sum, loads, parameters, short, show, walk

BYTES = (dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.int8)  # keys and values that have scales
KINDS = (*OPERANDS, dtypes.float32)      # of q and the result; GPUs have kernels of OPERANDS
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
MOST_ROWS = 8
MOST_HEAD = 1024    # d and d_v: of latents (MLA) 576 and 512
Length = Literal["memory", "argument", "most"]


@dataclass(frozen=True)
class Pages:
    """Keys or values: element d of token t of key head h in page p lies at offset + page · p + token · t +
    head · h + d."""
    dtype: DType
    page: int
    token: int
    head: int
    offset: int = 0

    @property
    def alignment_bytes(self) -> int:
        """The power of two, at most 16, of which every token's beginning is a multiple."""
        most = 16
        numbers = (self.page, self.token, self.head, self.offset)
        while any(number * self.dtype.itemsize % most for number in numbers): most //= 2
        return most


@dataclass(frozen=True)
class Scales:
    """Scales of keys or values, float32: that of page p and key head h lies at offset + page · p + head · h.
    """
    page: int
    head: int
    offset: int = 0


@dataclass(frozen=True)
class DecodeSpec:
    """A decode attention of `batch` requests at most, `heads` key heads with `group` query heads each. The
    three strides of q's and out's batch are those of request, key head and query head. `window` counts the
    row's own key. A contiguous cache (without `table`) has one page for each request, of any size."""
    batch: int
    heads: int
    group: int
    s_q: int
    d: int
    d_v: int
    page_size: int
    pages: int
    q: Rows
    k: Pages
    v: Pages
    out: Rows
    k_scale: Scales | None = None
    v_scale: Scales | None = None
    window: int | None = None
    score: Expression = field(default_factory=Sum)
    table: bool = True
    length: Length = "memory"
    causal: bool = True
    chunked: bool = False
    sinks: bool = False
    latent: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "group", "s_q", "d", "d_v", "pages"):
            if getattr(self, name) < 1: raise SpecError(f"{name}={getattr(self, name)}", "an extent ≥ 1")
        if self.window is not None and self.window < 1:
            raise SpecError(f"window={self.window}", "at least the row's own key: 1")
        if self.s_q > MOST_ROWS: raise SpecError(f"s_q={self.s_q}", f"at most {MOST_ROWS}")
        if max(self.d, self.d_v) > MOST_HEAD:
            raise SpecError(f"heads of {self.d} and {self.d_v} elements", f"at most {MOST_HEAD}")
        if self.window is not None and not self.causal and self.s_q > 1:
            raise SpecError(f"a window of {self.s_q} rows at one place", "rows at places of their own")
        if self.chunked and (self.window is None or not self.causal):
            raise SpecError("chunks " + ("without a window" if self.causal else "of rows at one place"),
                            "a window, the size of a chunk, of rows at places of their own")
        self._check_pages()
        self._check_dtypes()
        self._check_score()

    def _check_pages(self) -> None:
        if self.latent and ((self.k.page, self.k.token) != (self.v.page, self.v.token) or self.is_quantised):
            raise SpecError("values among keys whose " + ("dtype has scales" if self.is_quantised else
                                                          "pages or tokens lie elsewhere"),
                            "pages and tokens of keys, of floats")
        if self.table:
            if self.page_size not in PAGE_SIZES:
                raise SpecError(f"pages of {self.page_size} tokens",
                                f"one of {', '.join(map(str, PAGE_SIZES))}")
            if loads(self.score): raise SpecError("a score that reads memory, of pages with a table",
                                                  "sums, constants and positions")
        elif self.pages != 1 or self.page_size < 1:
            raise SpecError(f"{self.pages} pages of {self.page_size} tokens without a table",
                            "one page for each request")

    def _check_dtypes(self) -> None:
        if self.q.dtype not in KINDS or self.out.dtype != self.q.dtype:
            raise SpecError(f"q of {short(self.q.dtype)}, a result of {short(self.out.dtype)}",
                            f"one of {', '.join(map(short, KINDS))} for both")
        if self.k.dtype != self.v.dtype or self.k.dtype not in (self.q.dtype, *BYTES):
            raise SpecError(f"keys of {short(self.k.dtype)}, values of {short(self.v.dtype)}",
                            f"for both q's {short(self.q.dtype)}, or one of {', '.join(map(short, BYTES))}")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if (scale is None) == self.is_quantised or (scale is not None and not self.table):
                raise SpecError(f"{'no ' if scale is None else ''}{name} with {short(self.k.dtype)}",
                                "scales with keys and values of 8 bits in pages, and only then")

    def _check_score(self) -> None:
        if self.score.dtype != dtypes.float32: raise SpecError(f"scores of {self.score.dtype}", "float32")
        parameters(self.score)
        for node in walk(self.score):
            if isinstance(node, Sum) and node != Sum(): raise SpecError(f"{node} in a score", f"{Sum()}")
            if isinstance(node, Position) and isinstance(node.axis, int) and not 0 <= node.axis < 3:
                raise SpecError(f"{node} in a score", "0 (request), 1 (key head) or 2 (its query head)")

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values have scales."""
        return self.k.dtype in BYTES

    @property
    def parameters(self) -> tuple[DType, ...]:
        """The dtypes of the score's parameters."""
        return parameters(self.score)

    @property
    def rows(self) -> int:
        """Rows of a request that share a key head: row i of query head g is number i · group + g."""
        return self.group * self.s_q

    @property
    def reach(self) -> int:
        """How far before the length the first key lies that a row sees, or of `chunked` the first row."""
        assert self.window is not None
        return self.s_q if self.chunked else self.s_q + self.window - 1

    @property
    def longest(self) -> int:
        """Tokens of a request at most."""
        return self.pages * self.page_size

    @property
    def tuning_key(self) -> DecodeSpec:
        """The spec that a tuned schedule is kept for: any number of requests, so that no bit depends on
        it."""
        return replace(self, batch=1)

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return (self.longest,) if self.length == "argument" else ()

    def __str__(self) -> str:
        heads = f"{self.heads * self.group} heads" + (f" of {self.heads}" if self.group > 1 else "")
        d = str(self.d) if self.d == self.d_v else f"{self.d}/{self.d_v}"
        kv = f" of {short(self.k.dtype)}" if self.is_quantised else ""
        most = "" if self.length == "most" else "≤"
        words = [f"decode {self.batch}x{self.s_q}x{most}{self.longest}", heads, f"d {d}",
                 short(self.q.dtype) + kv]
        if self.table: words.append(f"pages of {self.page_size}")
        if self.s_q > 1 and not self.causal: words.append("full")
        if self.window is not None: words.append(f"{'chunks of' if self.chunked else 'window'} {self.window}")
        if self.sinks: words.append("sinks")
        if self.latent: words.append("latents")
        if self.score != Sum(): words.append(show(self.score))
        return ", ".join(words)
