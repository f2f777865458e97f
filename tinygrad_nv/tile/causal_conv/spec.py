"""Short causal convolutions of each channel, with a window of columns for each sequence. A spec does not know
its target.

Protocol: with `taps` K, token i of a sequence has

    out[i, c] = activate(bias[c] + Σ_j weight[c, j] · x[i − (K − 1) + j, c])    j = 0 … K − 1

in float32, rounded once. Tokens before the sequence's first of this call are columns of its window, the K − 1
newest, or 0. Tokens lie one after the other, and `sequences` are as of linear attention
(tile/linear_attention/spec.py): the window is read from the page `source`, and its new one written to `kept`
and `target`.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.linear_attention.spec import FLOATS


@dataclass(frozen=True)
class CausalConvSpec:
    """`sequences` over `tokens` tokens of `channels`, which begin at `offset` and lie `row` elements apart;
    windows in `pages`. `single`: no sequence has more than a token, and that of sequence s is s. Raises
    `SpecError`."""
    tokens: int
    sequences: int
    channels: int
    taps: int
    pages: int
    dtype: DType
    row: int
    offset: int = 0
    bias: bool = False
    silu: bool = False
    single: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "channels", "pages"):
            if getattr(self, name) < 1: raise SpecError(f"{name}={getattr(self, name)}", "an extent ≥ 1")
        if self.taps < 2: raise SpecError(f"a convolution of {self.taps} taps", "at least 2")
        if self.single and self.tokens != self.sequences:
            raise SpecError(f"{self.tokens} tokens of {self.sequences} sequences", "one of each")
        if self.dtype not in FLOATS: raise SpecError(short(self.dtype), ", ".join(map(short, FLOATS)))

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written: tokens, weights, and each sequence's windows."""
        return (2 * self.tokens + self.taps + 2 * self.sequences * (self.taps - 1)) * self.channels \
            * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """A product and a sum for each tap."""
        return 2 * self.tokens * self.channels * self.taps

    def __str__(self) -> str:
        each = "one token each" if self.single else f"{self.tokens} tokens"
        return f"{self.sequences} sequences, {each}, {self.channels} channels, {self.taps} taps" \
            f"{', silu' * self.silu}, {short(self.dtype)}"
