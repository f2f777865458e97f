"""Parts of a sampler: selection by mass, and draws.

A filter keeps the largest logits, as many as have a mass of `target`, and all that are equal to the last of
them:

    key_i = the bits of x_i as uint32 in the order of numbers
    t     = the largest t with mass(t) ≥ target, 0 if there is none        mass(t) = Σ weights[key ≥ t]
    out_i = x_i where key_i ≥ t, else -inf

With weights of 1 and a target of k, the k largest are kept; with probabilities and a target of top_p, a
nucleus. The target is one of a request's numbers. Sums are of float32 in one order: element i belongs to lane
i // ⌈size / LANES⌉, each lane is summed from its first element to its last, and then the lanes, from first to
last. The order decides what a sum is that is nearly the target, so it is part of what is computed.

A draw is the largest of logits with noise. That is standard Gumbel, of uniform numbers in (0, 1) of 23 bits
and a half, which float32 holds exactly (of 24 the largest would round to 1, whose noise is infinite):

    bits_i = low word of Threefry-2x32-20 of the counter (i, position) under the key `seed`
    out_i  = x_i - log(-log(((bits_i >> 9) + 0.5) · 2^-23))

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import SpecError

LANES = 128
DIGITS = 16     # that a radix selection tells apart in a pass: 4 bits


@dataclass(frozen=True)
class FilterSpec:
    """A filter of `size` float32 logits, with float32 weights, or weights of 1 where they are only `counted`.
    The target is number `knob` of a float32 tensor. Raises `SpecError` for no logit."""
    size: int
    knob: int
    counted: bool = False

    def __post_init__(self) -> None:
        if self.size < 1: raise SpecError(f"a filter of {self.size} logits", "one or more")

    @property
    def rows(self) -> int:
        """Elements of a lane."""
        return -(-self.size // LANES)

    def __str__(self) -> str: return f"{self.size} logits, {'counted' if self.counted else 'weighted'}"


@dataclass(frozen=True)
class GumbelSpec:
    """Logits of `size` tokens with noise from seed uint32 (2,) and position int32 (1,). Raises `SpecError`
    for 0."""
    size: int

    def __post_init__(self) -> None:
        if self.size < 1: raise SpecError(f"noise for {self.size} tokens", "one or more")

    def __str__(self) -> str: return f"noise for {self.size}"
