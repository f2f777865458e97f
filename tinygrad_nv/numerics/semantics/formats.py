"""Formats of floating-point numbers: codes to values and back.

Protocol: codes are unsigned integers, the bits of elements; values are float64, which has every number of
every format here exactly. `decode(codes, format)` and `encode(values, format, rounding, saturate)` work on
arrays. A value that float64 does not have comes rounded to odd (exact.py): then `encode` rounds it as if it
had all its digits.

    rounding   "rn" nearest, ties to even; "rna" nearest, ties away from zero; "rz" toward zero; "rm" down;
               "rp" up; "rs" stochastic: up where the first 16 digits that are cut, plus 16 random bits,
               carry
    overflow   to infinity, or the largest number where the rounding points back from it; e4m3 has no infinity
               and becomes NaN. With `saturate` the largest number, from infinity too
    NaN        one code, `Format.nan`, with no sign
    tf32       lies in 32 bits, of which the lower 13 are not read (PTX ISA, mma, alternate floating-point)

Sources: IEEE 754-2019; e4m3 and e5m2: OCP 8-bit Floating Point Specification (OFP8) 1.0.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[Any]
Values = npt.NDArray[np.float64]
ROUNDINGS = ("rn", "rna", "rz", "rm", "rp", "rs")
NOISE_BITS = 16     # random bits of a stochastic rounding
KINDS: dict[int, type[np.unsignedinteger[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@dataclass(frozen=True)
class Format:
    """A binary format: bits of exponent and mantissa, the code of its NaN, and that of its largest number."""
    name: str
    exponent: int
    mantissa: int
    nan: int
    largest_code: int
    infinite: bool = True
    unread: int = 0     # low bits of a code that are no part of the number

    @property
    def least(self) -> int:
        """The exponent of the smallest normal number, and of all subnormal ones."""
        return 2 - (1 << (self.exponent - 1))

    @property
    def sign(self) -> int:
        """The bit of the sign, without the bits that are not read."""
        return 1 << (self.exponent + self.mantissa)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent + self.mantissa + self.unread

    @property
    def kind(self) -> type[np.unsignedinteger[Any]]:
        """The NumPy dtype of codes."""
        return KINDS[self.bits]

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(decode(np.array([self.largest_code << self.unread], self.kind), self)[0])


F32 = Format("f32", 8, 23, 0x7fffffff, 0x7f7fffff)
TF32 = Format("tf32", 8, 10, 0x3ffff, 0x3fbff, unread=13)
F16 = Format("f16", 5, 10, 0x7fff, 0x7bff)
BF16 = Format("bf16", 8, 7, 0x7fff, 0x7f7f)
E4M3 = Format("e4m3", 4, 3, 0x7f, 0x7e, infinite=False)
E5M2 = Format("e5m2", 5, 2, 0x7f, 0x7b)
FORMATS = {each.name: each for each in (F32, TF32, F16, BF16, E4M3, E5M2)}


def decode(codes: Codes, of: Format) -> Values:
    """The values of codes, float64."""
    whole = codes.astype(np.int64) >> of.unread
    size = whole & (of.sign - 1)
    exponent, fraction = size >> of.mantissa, size & ((1 << of.mantissa) - 1)
    significand = np.where(exponent > 0, fraction | 1 << of.mantissa, fraction).astype(np.float64)
    values = np.ldexp(significand, np.maximum(exponent, 1) + (of.least - 1 - of.mantissa))
    beyond = size > of.largest_code
    values = np.where(beyond, np.where((size == of.largest_code + 1) & of.infinite, np.inf, np.nan), values)
    return np.where(whole & of.sign, -values, values)


def encode(values: Values, to: Format, rounding: str = "rn", saturate: bool = False,
           noise: Codes | None = None) -> Codes:
    """The codes of values. `noise`: integers below 2^16, an element each, for "rs"."""
    assert rounding in ROUNDINGS
    negative, size = np.signbit(values), np.abs(values)
    real = np.isfinite(size)
    finite = np.where(real, size, 0.0)
    power = np.where(finite == 0, to.least, np.maximum(np.frexp(finite)[1] - 1, to.least))
    scaled = np.ldexp(finite, to.mantissa - power)
    count = np.floor(scaled)
    up = _goes_up(count, scaled - count, negative, rounding, noise)
    # far above the format's range a code would not fit 64 bits; any above the largest overflows
    power = np.minimum(power, 1 - to.least + 2)
    code = count.astype(np.int64) + up + ((power - to.least).astype(np.int64) << to.mantissa)
    back = (rounding == "rz") | ((rounding == "rm") & ~negative) | ((rounding == "rp") & negative)
    infinity = to.largest_code + 1 if to.infinite else to.nan
    over = code > to.largest_code
    code = np.where(over, np.where(back | saturate, to.largest_code, infinity), code)
    code = np.where(np.isinf(size), to.largest_code if saturate else infinity, code)
    code = np.where(negative & (code != to.nan), code | to.sign, code)
    return (np.where(np.isnan(size), to.nan, code) << to.unread).astype(to.kind)


def _goes_up(count: Values, rest: Values, negative: npt.NDArray[np.bool_], rounding: str,
             noise: Codes | None) -> npt.NDArray[np.bool_]:
    """Whether a magnitude is rounded away from zero: `rest`, 0 to 1, is what is cut off."""
    some = rest > 0
    if rounding == "rn": return np.asarray((rest > 0.5) | ((rest == 0.5) & (count % 2 == 1)))
    if rounding == "rna": return np.asarray(rest >= 0.5)
    if rounding == "rm": return np.asarray(some & negative)
    if rounding == "rp": return np.asarray(some & ~negative)
    if rounding == "rz": return np.zeros(rest.shape, np.bool_)
    assert noise is not None, "stochastic rounding needs its random bits"
    return np.asarray(np.floor(rest * 2.0 ** NOISE_BITS) + noise >= 2.0 ** NOISE_BITS)


def flush_subnormals(codes: Codes, of: Format) -> Codes:
    """Subnormal numbers as zeros of their sign."""
    exponent = (of.sign - 1) >> of.mantissa << of.mantissa << of.unread
    return np.where(codes & exponent, codes, codes & (of.sign << of.unread)).astype(codes.dtype)
