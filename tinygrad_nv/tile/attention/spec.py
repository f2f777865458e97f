"""Specs of attention: softmax(score(q kᵀ)) v, for every head of a batch.

Protocol. For each element of `batch` (batch, key head, query head of that key head):

    sum[r, c]  = Σ_d q[r, d] k[c, d]                                      float32
    s[r, c]    = score(sum[r, c])     where `band` lets row r see column c, else −inf
    l[r]       = log Σ_c exp s[r, c]                                      natural logarithms
    p[r, c]    = exp(s[r, c] − l[r])                                      rounded to v's dtype
    out[r, d]  = Σ_c p[r, c] v[c, d]                                      float32, then rounded to out's dtype

`score` is an expression (tile/expression.py) of the sum, all of it in float32: scale, soft-cap, biases, and
masks that are computed or read from memory, as `where(…, x, −inf)`. `Position("m")` is the row r,
`Position("n")` the column c, `Position("start")` is `start`, `Position(i)` the index along dimension i of the
batch; loads have three batch strides. A row that sees nothing, or only −inf, gives zeros, and l = −inf.

`band` is the part of the mask that is a band: row r sees columns r + start + first … r + start + last, of
those from 0 to s_kv − 1. Blocks of columns that no row of a block sees are skipped, blocks that all of its
rows see are not masked. `start` is where row 0 stands in the sequence of keys.

Extents named in `symbolic`, some of s_q, s_kv and start, are arguments of a launch, at most the spec's; the
others are fixed. Strides are in elements; along d elements lie side by side.

`total`, rows of q and of k, makes a ragged batch: sequences lie one after the other, and two arrays in
memory, s32 [batch[0] + 1], say where: sequence b has rows cu_q[b] … cu_q[b + 1] − 1 of q and of the result,
cu_k[b] … cu_k[b + 1] − 1 of k and v. Strides along the batch are 0. s_q and s_kv are the most rows that a
sequence has, 0 the fewest; r and c count from the sequence's first, and start is its s_kv − s_q, so that the
last row sees the last column of a causal band (as in FlashAttention 2.1); rows that stand before the first
column see nothing of it. Rows of the result after those of the last sequence are zeros. l is [*batch, s_q]
still; rows that a sequence lacks are not written.

`kept` below 256 is dropout, of p alone: l and the sum by which p is divided are those without it.

    p[r, c]    = keep[r, c] · 256 / kept · exp(s[r, c] − l[r])

keep is 1 for kept of 256 elements, else 0, by a seed in memory (dropout.py).

With `sinks` each matrix of the batch has one more logit, float32 in memory with these strides along the
batch, which no value belongs to (attention sinks, arXiv 2309.17453):

    l[r]       = log (Σ_c exp s[r, c] + exp sink)

so that weights add up to less than 1. A sink of −inf is none.

`documents`: rows are tokens of documents that lie one after the other, and see their own document alone
(documents.py). s_q = s_kv, start is 0. The score's parameters 0 and 1 say where a row's document begins and
ends, and the score hides what is outside, so that a kernel need not know. Those that do skip it.

q, k and v of fp8e4m3 have `scales`, float32 numbers ≥ 0 in memory by which blocks of their rows are worth
more or less, of q, of k and of v:

    sum[r, c]  = scale_q[r] scale_k[c] Σ_d q[r, d] k[c, d]
    out[r, d]  = Σ_c p[r, c] scale_v[c] v[c, d]

For the second product w[r, c] = 2⁸ exp(s[r, c] − m[r]) is rounded to e4m3, m the largest score of the row in
the blocks so far: the largest w is 256 of e4m3's 448, those below 2⁻⁶ (weights of 2⁻¹⁴) have fewer bits than
four, those below 2⁻¹⁰ (2⁻¹⁸) are 0. Totals, by which the result is divided, are of what w was before.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.band import FULL, INTEGERS, Band, BlockRange
from tinygrad_nv.tile.expression import (
    Apply,
    Constant,
    Expression,
    Position,
    Sum,
    parameters,
    short,
    show,
    walk,
)

OPERANDS = (dtypes.bfloat16, dtypes.float16)  # of tensor cores
SCALED = dtypes.fp8e4m3                         # with scales
KINDS = (*OPERANDS, dtypes.float32, SCALED)    # of q, k and v
RESULTS = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
SYMBOLS = ("s_q", "s_kv", "start")
MOST_HEAD = 256     # d and d_v
KEEP_ALL = 256         # `kept` of 256: no dropout
MOST_SCALE = 2.0**60  # of scales that need not be evaluated: all that follows from them is a normal float32


@dataclass(frozen=True)
class Rows:
    """A matrix of rows for each element of the batch: element (b, r, d) lies at offset + Σ batch · b +
    row · r + d."""
    dtype: DType
    row: int
    batch: tuple[int, int, int]
    offset: int = 0

    @property
    def alignment_bytes(self) -> int:
        """The power of two, at most 16, of which every row's beginning is a multiple if the storage's is."""
        most = 16
        while any(number * self.dtype.itemsize % most for number in (self.row, self.offset, *self.batch)):
            most //= 2
        return most


@dataclass(frozen=True)
class RowScales:
    """Scales of blocks of `rows` rows: that of row r of element b of the batch lies at offset + Σ batch · b +
    r // rows · block. With `block` 0 all rows have the same."""
    rows: int = 1
    block: int = 0
    batch: tuple[int, int, int] = (0, 0, 0)
    offset: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """An attention. `batch` has three extents: batch, key heads, query heads of a key head; k and v have
    stride 0 along the last. With `lse` l is written too: float32, [*batch, s_q], dense."""
    s_q: int
    s_kv: int
    d: int
    d_v: int
    q: Rows
    k: Rows
    v: Rows
    out: Rows
    batch: tuple[int, int, int] = (1, 1, 1)
    score: Expression = field(default_factory=Sum)
    band: Band = FULL
    start: int = 0
    symbolic: tuple[str, ...] = ()
    lse: bool = False
    total: tuple[int, int] | None = None
    kept: int = KEEP_ALL
    scales: tuple[RowScales, RowScales, RowScales] | None = None
    sinks: tuple[int, int, int] | None = None
    documents: bool = False

    def __post_init__(self) -> None:
        extents = (("s_q", self.s_q), ("s_kv", self.s_kv), ("d", self.d), ("d_v", self.d_v),
                   *((f"batch[{i}]", extent) for i, extent in enumerate(self.batch)))
        for name, extent in extents:
            if extent < 1: raise SpecError(f"{name}={extent}", "an extent ≥ 1")
        if self.start < 0: raise SpecError(f"start={self.start}", "a place ≥ 0")
        if max(self.d, self.d_v) > MOST_HEAD:
            raise SpecError(f"heads of {self.d} and {self.d_v} elements", f"at most {MOST_HEAD}")
        if list(self.symbolic) != [name for name in SYMBOLS if name in self.symbolic]:
            raise SpecError(f"symbolic {self.symbolic}", f"some of {', '.join(SYMBOLS)}, in this order")
        if not 1 <= self.kept <= KEEP_ALL: raise SpecError(f"kept={self.kept}",
                                                           f"1 to {KEEP_ALL} of {KEEP_ALL}")
        if self.total is not None: self._check_ragged(self.total)
        self._check_dtypes()

    def _check_ragged(self, total: tuple[int, int]) -> None:
        for name, count in zip(("q", "k"), total, strict=True):
            if count < 1: raise SpecError(f"{count} rows of {name} in all", "at least 1")
        if self.start or self.symbolic:
            raise SpecError(f"start={self.start} and symbolic {self.symbolic} of a ragged batch",
                            "neither: a sequence's extents are in memory")
        if any(rows.batch[0] for rows in (self.q, self.k, self.v, self.out)):
            raise SpecError("a stride along the sequences of a ragged batch", "0: first rows are in memory")

    def _check_dtypes(self) -> None:
        if self.q.dtype not in KINDS or {self.k.dtype, self.v.dtype} != {self.q.dtype}:
            raise SpecError(f"attention of {', '.join(short(x.dtype) for x in (self.q, self.k, self.v))}",
                            f"one of {', '.join(map(short, KINDS))} for q, k and v")
        if (self.scales is not None) != (self.q.dtype == SCALED):
            raise SpecError(f"{short(self.q.dtype)} {'with' if self.scales else 'without'} scales",
                            "scales of e4m3, of nothing else")
        if self.scales is not None: self._check_scales(self.scales)
        if self.scales is not None and self.sinks is not None:
            raise SpecError("sinks of e4m3 operands", "sinks of floats of 16 or 32 bits")
        if self.out.dtype not in RESULTS:
            raise SpecError(f"a result of {self.out.dtype}", "a float of 16 or 32 bits")
        if self.score.dtype != dtypes.float32: raise SpecError(f"scores of {self.score.dtype}", "float32")
        if self.k.batch[2] or self.v.batch[2]:
            raise SpecError("keys that differ between the query heads of a key head", "stride 0 along them")
        parameters(self.score)
        for node in walk(self.score):
            if isinstance(node, Sum) and node != Sum(): raise SpecError(f"{node} in a score", f"{Sum()}")
            if isinstance(node, Position) and isinstance(node.axis, int) and not 0 <= node.axis < 3:
                raise SpecError(f"{node} in a score", "a dimension of the batch: 0, 1 or 2")

    def _check_scales(self, scales: tuple[RowScales, RowScales, RowScales]) -> None:
        for name, each in zip("qkv", scales, strict=True):
            if each.rows < 1: raise SpecError(f"scales of {each.rows} rows of {name}", "at least 1")
            if name != "q" and each.batch[2]:
                raise SpecError(f"scales of {name} that differ between the query heads of a key head",
                                "stride 0 along them")

    @property
    def parameters(self) -> tuple[DType, ...]:
        """The dtypes of the score's parameters."""
        return parameters(self.score)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences lie one after the other."""
        return self.total is not None

    @property
    def matrices(self) -> int:
        """Query heads of the whole batch."""
        return prod(self.batch)

    @property
    def pairs(self) -> int:
        """How many (row, column) pairs the band lets see each other, in one head; of a ragged batch, in one
        of a longest sequence."""
        if self.band.full: return self.s_q * self.s_kv
        start = self.s_kv - self.s_q if self.is_ragged else self.start
        rows = BlockRange.of_rows(INTEGERS, self.band, np.arange(self.s_q), 1, self.s_q, self.s_kv, start)
        seen = rows.visible()
        return int(np.maximum(seen.end - seen.begin, 0).sum())

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return tuple(getattr(self, name) for name in self.symbolic)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, of the pairs that see each other."""
        return 2 * self.matrices * self.pairs * (self.d + self.d_v)

    def __str__(self) -> str:
        b, kv, group = self.batch
        def extent(name: str) -> str: return f"{'≤' if name in self.symbolic else ''}{getattr(self, name)}"
        heads = f"{kv * group} heads" + (f" of {kv}" if group > 1 else "")
        d = str(self.d) if self.d == self.d_v else f"{self.d}/{self.d_v}"
        words = [f"{b}x{extent('s_q')}x{extent('s_kv')}", heads, f"d {d}", short(self.q.dtype),
                 str(self.band)]
        if self.total is not None: words[0] = f"{b} of {self.total[0]}x{self.total[1]}"
        if self.kept < KEEP_ALL: words.append(f"{self.kept}/{KEEP_ALL} kept")
        if self.sinks is not None: words.append("sinks")
        if self.documents: words.append("documents")
        if self.start or "start" in self.symbolic: words.append(f"from {extent('start')}")
        if self.score != Sum(): words.append(show(self.score))
        return ", ".join(words)


def multiple(score: Expression) -> float | None:
    """The positive number by which a score is the sum's multiple; None where it is another expression, or the
    number out of all proportion."""
    if score == Sum(): return 1.0
    if not isinstance(score, Apply) or score.op != "mul": return None
    for one, other in (score.args, score.args[::-1]):
        if isinstance(one, Constant) and (inner := multiple(other)) is not None:
            scale = inner * float(one.value)
            return scale if 1 / MOST_SCALE < scale < MOST_SCALE else None
    return None
