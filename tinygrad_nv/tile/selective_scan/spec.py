"""Selective scans (Mamba, arXiv 2312.00752) with a state for each sequence. A spec does not know its target.

Protocol: a sequence's state S, float32 (states, channels), is read and changed by its tokens in their order.
Of each token there are x and a step Δ of each channel, and B and C of each of a channel's states; A ≤ 0 is
that of all tokens:

    S[n, e] ← exp(Δ[e] A[n, e]) S[n, e] + Δ[e] x[e] B[n]
    out[e] = Σ_n C[n] S[n, e]                               float32

Tokens lie one after the other, and `sequences` are as of linear attention (tile/linear_attention/spec.py):
the state is read from the page `source`, and written to `kept` and `target`.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.linear_attention.spec import FLOATS


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
        for name in ("tokens", "sequences", "channels", "states", "pages"):
            if getattr(self, name) < 1: raise SpecError(f"{name}={getattr(self, name)}", "an extent ≥ 1")
        if self.single and self.tokens != self.sequences:
            raise SpecError(f"{self.tokens} tokens of {self.sequences} sequences", "one of each")
        for each in (self.x, self.b, self.c):
            if each.dtype not in FLOATS:
                raise SpecError(short(each.dtype), ", ".join(map(short, FLOATS)))

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
        each = "one token each" if self.single else f"{self.tokens} tokens"
        return f"{self.sequences} sequences, {each}, {self.channels} channels of {self.states} states, " \
            f"{short(self.x.dtype)}"
