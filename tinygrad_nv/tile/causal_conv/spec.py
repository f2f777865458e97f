"""Short causal convolutions of each channel, with a window of columns for each sequence. A spec does not know
its target.

Protocol: with `taps` K, token i of a sequence has

    out[i, c] = activate(bias[c] + Σ_j weight[c, j] · x[i − (K − 1) + j, c])    j = 0 … K − 1

in float32, rounded once. Tokens before the sequence's first of this call are columns of its window, the K − 1
newest, or 0. `sequences` are as in tile/sequences.py: the window is read from the page `source`, and its new
one written to `kept` and `target`.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.sequences import check, describe


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
        check(self, ("channels",), (self.dtype,))
        if self.taps < 2: raise SpecError(f"a convolution of {self.taps} taps", "at least 2")

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
        return f"{describe(self)}, {self.channels} channels, {self.taps} taps{', silu' * self.silu}, " \
            f"{short(self.dtype)}"
