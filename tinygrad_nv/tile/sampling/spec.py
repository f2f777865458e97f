"""Parts of a sampler, for rows of logits: selection by mass, and the choice of a token.

A row's numbers are `NUMBERS` of float32 (`Number` says which is which), its seed among them. Its results
depend on its own logits and numbers alone.

A filter keeps a row's largest logits, as many as have a mass of `target`, and all that are equal to the last
of them:

    key_i = the bits of x_i as uint32 in the order of numbers
    unit  = 2^(⌊log2 target⌋ - 29), at least 2^-127
    t     = the largest t with mass(t) ≥ target, 0 if there is none      mass(t) = unit · Σ units[key ≥ t]
    units = weights / unit to the nearest integer, of two the even one, at most `MOST_UNITS`, none below 0
    out_i = x_i where key_i ≥ t, else -inf

With weights of 1 and a target of k, the k largest are kept; with probabilities and a target of top_p, a
nucleus; with a target of infinity, or none that is a number, all. The target is one of the row's numbers.
Sums are of integers, so that their order does not matter. One that is compared with the target is off by
half a unit for each weight at most, of n weights by n · 2^-30 of the target; by nothing where weights are
multiples of the unit, as integers are up to a target of 2^30.

A choice is a row's largest logit, the first of equals; where the row has a temperature, after noise is added.
That is standard Gumbel, of uniform numbers in (0, 1) of 23 bits and a half, which float32 holds exactly (of
24 the largest would round to 1, whose noise is infinite):

    bits_i = of Threefry-2x32-20 of the counter (i // 2, place) under the row's seed: the low word where i is
             even, the high word where it is odd
    y_i    = x_i - log(-log(((bits_i >> 9) + 0.5) · 2^-23))
    token  = the least i of which y_i is the largest; size where any y_i is NaN

A choice from a part of a longer row, of its elements `first`, `first` + 1, …, makes a key, uint64, instead of
a token. The largest key of all parts of a row has its token: an earlier element's key is larger than that of
an equal one.

    key    = 2^32 · (the bits of y_i in the order of numbers, of -0 those of 0) + 2^32 - 1 - i, of the part's
             token i; 2^64 - 1 where any y_i is NaN

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError

MOST_UNITS = 1 << 30     # of one weight, more than any target
DIGITS = 16     # that a radix selection tells apart in a pass: 4 bits
MOST_FIRST = 1 << 30    # where a part begins: elements are numbered by int32


class Number(IntEnum):
    """Indices of a row's numbers."""
    temperature = 0         # 0: the largest logit, without noise
    top_k = 1               # infinity: none
    top_p = 2               # infinity: none
    min_p = 3
    repetition_penalty = 4
    presence_penalty = 5
    frequency_penalty = 6
    seed = 7                # and the next three: 16 bits of it each, the lowest first


SEEDS = 4
NUMBERS = Number.seed + SEEDS


@dataclass(frozen=True)
class FilterSpec:
    """A filter of `rows` rows of `size` float32 logits, with float32 weights, or weights of 1 where they are
    only `counted`. The target is `number` of float32 [rows, NUMBERS]. Raises `SpecError` for no logit."""
    rows: int
    size: int
    number: Number
    counted: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.size) < 1:
            raise SpecError(f"a filter of {self.rows} rows of {self.size} logits", "one or more")

    @property
    def flops(self) -> int:
        """Operations, of the first pass."""
        return 2 * DIGITS * self.rows * self.size

    def __str__(self) -> str:
        return f"{self.rows}x{self.size} logits, {'counted' if self.counted else 'weighted'}"


@dataclass(frozen=True)
class ChoiceSpec:
    """A choice from each of `rows` rows of `size` float32 logits, by float32 numbers [rows, NUMBERS] and
    int32 places [rows]: int32 [rows]. Without `draw` no row has a temperature. With `first` the logits are a
    part of a longer row, from this element on: uint64 keys [rows]. Raises `SpecError` for no logit, and for a
    part that begins within a pair of elements, which have one random number."""
    rows: int
    size: int
    draw: bool = True
    first: int | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.size) < 1:
            raise SpecError(f"a choice from {self.rows} rows of {self.size} logits", "one or more")
        if self.first is not None and (self.first % 2 or not 0 <= self.first <= MOST_FIRST):
            raise SpecError(f"a choice from a part of rows that begins at element {self.first}",
                            f"an even one, up to {MOST_FIRST}")

    @property
    def result_dtype(self) -> DType:
        """Dtype of what is made: tokens, or keys of a part."""
        return dtypes.int32 if self.first is None else dtypes.uint64

    @property
    def flops(self) -> int:
        """Operations: 10 rounds of Threefry and two logarithms an element."""
        return 110 * self.rows * self.size

    def __str__(self) -> str:
        part = "" if self.first is None else f" from {self.first} on"
        return f"{self.rows}x{self.size} logits{part}, {'drawn' if self.draw else 'the largest'}"


@dataclass(frozen=True)
class CountSpec:
    """1 added to float32 counts [slots, size] at (slots[r], tokens[r]) for each of `rows` rows; nothing where
    either is out of range. No two rows have one slot. Raises `SpecError` for nothing to count."""
    rows: int
    slots: int
    size: int
    flops: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.slots, self.size) < 1:
            raise SpecError(f"{self.rows} counts in {self.slots}x{self.size}", "one or more")

    def __str__(self) -> str: return f"{self.rows} tokens counted in {self.slots}x{self.size}"
