"""Operations on float64 whose results are rounded to odd.

A number that float64 does not have lies between two that it has, of which one ends in 1: that one is taken.
Rounding it once more, in any direction, to a format with at least two digits less gives what rounding the
number itself gives (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008). So `encode` of
these results is correctly rounded for all formats of formats.py.

What is dropped is known exactly: of a sum by Knuth's TwoSum, of a product by Dekker's, of a quotient and a
root by the remainder, for operands of at most 48 digits and exponents within 2^±400.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.numerics.semantics.formats import Values

SPLIT = 2.0 ** 27 + 1


def odd(rounded: Values, dropped: Values) -> Values:
    """`rounded` + `dropped` rounded to odd: `rounded` is the nearest, `dropped` less than its last place."""
    even = rounded.view(np.int64) & 1 == 0
    inexact = np.isfinite(rounded) & np.isfinite(dropped) & (dropped != 0)
    other = np.nextafter(rounded, np.where(dropped > 0, np.inf, -np.inf))
    return np.where(inexact & even, other, rounded)


def two_sum(a: Values, b: Values) -> tuple[Values, Values]:
    """a + b to nearest, and what that drops."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_product(a: Values, b: Values) -> tuple[Values, Values]:
    """a · b to nearest, and what that drops."""
    total = a * b
    (high, low), (top, rest) = _halves(a), _halves(b)
    return total, low * rest - (((total - high * top) - low * top) - high * rest)


def _halves(a: Values) -> tuple[Values, Values]:
    scaled = SPLIT * a
    high = scaled - (scaled - a)
    return high, a - high


def add(a: Values, b: Values) -> Values:
    """a + b."""
    with np.errstate(invalid="ignore"): return odd(*two_sum(a, b))


def fma(a: Values, b: Values, c: Values) -> Values:
    """a · b + c, where a · b is exact in float64: of operands with 24 digits or fewer."""
    with np.errstate(invalid="ignore"): return odd(*two_sum(a * b, c))


def divide(a: Values, b: Values) -> Values:
    """a / b."""
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient = a / b
        back, dropped = two_product(quotient, b)
        remainder = (a - back) - dropped
        return odd(quotient, np.where(np.isfinite(b) & (b != 0), remainder / b, 0.0))


def root(a: Values) -> Values:
    """The square root."""
    with np.errstate(invalid="ignore"):
        found = np.sqrt(a)
        back, dropped = two_product(found, found)
        return odd(found, (a - back) - dropped)
