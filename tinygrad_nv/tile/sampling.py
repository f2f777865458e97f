"""Parts of a sampler: selection by mass, and noise for draws.

A threshold is where a sum over the largest keys reaches a target:

    out = the largest t with mass(t) ≥ target, 0 if there is none        mass(t) = Σ weights[keys ≥ t]

With weights of 1 and a target of k that is the k-th largest key; with probabilities and a target of top_p the
smallest key of a nucleus. Sums are of float32 in one order: element i belongs to lane i // ⌈size / LANES⌉,
each lane is summed from its first element to its last, and then the lanes, from first to last. The order
decides what a sum is that is nearly the target, so it is part of what is computed.

Noise is standard Gumbel, of uniform numbers in (0, 1) of 23 bits and a half, which float32 holds exactly (of
24 the largest would round to 1, whose noise is infinite):

    bits_i = low word of Threefry-2x32-20 of the counter (i, position) under the key `seed`
    out_i  = -log(-log(((bits_i >> 9) + 0.5) · 2^-23))

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import SpecError

LANES = 128
DIGITS = 16     # that a radix selection tells apart in a pass: 4 bits


@dataclass(frozen=True)
class ThresholdSpec:
    """A threshold of `size` uint32 keys, with float32 weights, or weights of 1 where they are only `counted`.
    Raises `SpecError` for no key."""
    size: int
    counted: bool = False

    def __post_init__(self) -> None:
        if self.size < 1: raise SpecError(f"{self.size} keys", "one or more")

    @property
    def rows(self) -> int:
        """Elements of a lane."""
        return -(-self.size // LANES)

    def __str__(self) -> str: return f"{self.size} keys, {'counted' if self.counted else 'weighted'}"


@dataclass(frozen=True)
class GumbelSpec:
    """Noise for `size` tokens, from seed uint32 (2,) and position uint32 (1,). Raises `SpecError` for 0."""
    size: int

    def __post_init__(self) -> None:
        if self.size < 1: raise SpecError(f"noise for {self.size} tokens", "one or more")

    def __str__(self) -> str: return f"noise for {self.size}"
