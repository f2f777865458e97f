"""Selective scans (Mamba, arXiv 2312.00752) with a state for each sequence. A spec does not know its target.

Protocol: a sequence's state S, float32 (states, channels), is read and changed by its tokens in their order.
Of each token there are x and a step Δ of each channel, and B and C of each of a channel's states; A ≤ 0 is
that of all tokens:

    S[n, e] ← exp(Δ[e] A[n, e]) S[n, e] + Δ[e] x[e] B[n]
    out[e] = Σ_n C[n] S[n, e]                               float32

`sequences` are as in tile/sequences.py: the state is read from the page `source`, and written to `kept` and
`target`.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.sequences import check, describe


@dataclass(frozen=True)
class Rows:
    """Element i of token t lies at offset + row · t + i."""
    dtype: DType
    row: int
    offset: int = 0


@dataclass(frozen=True)
class SelectiveScanSpec:
    """`sequences` over `tokens` tokens of `channels`, each with so many `states`, which lie in `pages`; x, B
    and C lie in rows. `single`: no sequence has more than a token, and that of sequence s is s. Raises
    `SpecError`."""
    tokens: int
    sequences: int
    channels: int
    states: int
    pages: int
    x: Rows
    b: Rows
    c: Rows
    single: bool = False

    def __post_init__(self) -> None:
        check(self, ("channels", "states"), (self.x.dtype, self.b.dtype, self.c.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written: tokens, A, and each sequence's states."""
        rows = self.channels * (self.x.dtype.itemsize + 8)
        rows += self.states * (self.b.dtype.itemsize + self.c.dtype.itemsize)
        return self.tokens * rows + 4 * (2 * self.sequences + 1) * self.states * self.channels

    @property
    def flops(self) -> int:
        """Operations of each state: a decay and its exponent, a change, a product and a sum."""
        return 7 * self.tokens * self.channels * self.states

    def __str__(self) -> str:
        return f"{describe(self)}, {self.channels} channels of {self.states} states, {short(self.x.dtype)}"
