"""Floating point by definition: numbers as fractions, each operation exact, then rounded once. Slow, and
independent of any floating-point unit.

Protocol: a number is (sign, magnitude): sign 0 or 1, magnitude a Fraction, or the words "inf" and "nan".
`decode` and `encode` take the bits of a `Format`.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

Magnitude = Fraction | str
Number = tuple[int, Magnitude]
NAN: Number = (0, "nan")


@dataclass(frozen=True)
class Format:
    """A binary format of IEEE 754's kind; `nan` is PTX's canonical one, `largest` the highest finite code."""
    exponent: int
    mantissa: int
    nan: int
    largest: int = 0
    infinite: bool = True

    @property
    def top(self) -> int:
        """The code of the largest finite number."""
        return self.largest or (((1 << self.exponent) - 1) << self.mantissa) - 1

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.exponent + self.mantissa)


F16, BF16 = Format(5, 10, 0x7fff), Format(8, 7, 0x7fff)
F32, F64 = Format(8, 23, 0x7fffffff), Format(11, 52, 0x7ff8000000000000)
TF32 = Format(8, 10, 0x3ffff)
E4M3, E5M2 = Format(4, 3, 0x7f, 0x7e, infinite=False), Format(5, 2, 0x7f)


def decode(bits: int, to: Format) -> Number:
    """The number of a code."""
    sign, code = int(bool(bits & to.sign)), bits & (to.sign - 1)
    if code > to.top: return (sign, "inf" if to.infinite and code == to.top + 1 else "nan")
    exponent, fraction = code >> to.mantissa, code & ((1 << to.mantissa) - 1)
    if exponent: fraction |= 1 << to.mantissa
    power = max(exponent, 1) - ((1 << (to.exponent - 1)) - 1) - to.mantissa
    return sign, fraction * Fraction(2) ** power


def encode(number: Number, to: Format, mode: str = "rn") -> int:
    """The code of a number, rounded."""
    sign, size = number
    if size == "nan": return to.nan
    at = to.sign if sign else 0
    if size == "inf": return at | (to.top + 1 if to.infinite else to.nan)
    assert isinstance(size, Fraction)
    if size == 0: return at
    least = 2 - (1 << (to.exponent - 1))
    power = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** power > size: power -= 1
    quantum = Fraction(2) ** (max(power, least) - to.mantissa)
    count, rest = divmod(size, quantum)
    half = quantum / 2
    up = {"rn": rest > half or (rest == half and count & 1), "rna": rest >= half, "rz": False,
          "rm": bool(rest and sign), "rp": bool(rest and not sign)}[mode]
    code = int(count) + bool(up) + (max(power, least) - least << to.mantissa)
    if code <= to.top: return at | code
    stays = mode == "rz" or mode == ("rp" if sign else "rm")
    return at | (to.top if stays else to.top + 1)


# **** operations ****

def negative(a: Number) -> Number:
    """The other sign."""
    return 1 - a[0], a[1]


def added(a: Number, b: Number, mode: str) -> Number:
    """a + b: an exact zero of different signs is -0 when rounding down."""
    if "nan" in (a[1], b[1]): return NAN
    if "inf" in (a[1], b[1]):
        if a[1] == b[1]: return a if a[0] == b[0] else NAN
        return a if a[1] == "inf" else b
    assert isinstance(a[1], Fraction)
    assert isinstance(b[1], Fraction)
    total = (-a[1] if a[0] else a[1]) + (-b[1] if b[0] else b[1])
    if total == 0: return (a[0] if a[0] == b[0] else int(mode == "rm"), total)
    return int(total < 0), abs(total)


def multiplied(a: Number, b: Number) -> Number:
    """a * b."""
    sign = a[0] ^ b[0]
    if "nan" in (a[1], b[1]): return NAN
    if "inf" in (a[1], b[1]): return NAN if 0 in (a[1], b[1]) else (sign, "inf")
    assert isinstance(a[1], Fraction)
    assert isinstance(b[1], Fraction)
    return sign, a[1] * b[1]


def divided(a: Number, b: Number) -> Number:
    """a / b."""
    sign = a[0] ^ b[0]
    if "nan" in (a[1], b[1]) or (a[1] == b[1] and a[1] in ("inf", 0)): return NAN
    if a[1] == "inf" or b[1] == 0: return sign, "inf"
    if b[1] == "inf": return sign, Fraction(0)
    assert isinstance(a[1], Fraction)
    assert isinstance(b[1], Fraction)
    return sign, a[1] / b[1]


def rooted(a: Number) -> Number:
    """The root, to 200 bits and one that says that there are more."""
    if a[1] in ("nan", 0): return a
    if a[0]: return NAN
    if a[1] == "inf": return a
    assert isinstance(a[1], Fraction)
    scale = 1400
    scaled = a[1] * 4 ** scale
    assert scaled.denominator == 1
    root = isqrt(scaled.numerator)
    return 0, Fraction(2 * root + (root * root != scaled.numerator), 2 ** (scale + 1))


def operation(name: str, operands: list[Number], mode: str) -> Number:
    """add, sub, mul, fma, div, rcp, sqrt by name."""
    match name:
        case "add": return added(operands[0], operands[1], mode)
        case "sub": return added(operands[0], negative(operands[1]), mode)
        case "mul": return multiplied(operands[0], operands[1])
        case "fma" | "mad": return added(multiplied(operands[0], operands[1]), operands[2], mode)
        case "div": return divided(operands[0], operands[1])
        case "rcp": return divided((0, Fraction(1)), operands[0])
        case "sqrt": return rooted(operands[0])
    raise ValueError(name)


def flushed(bits: int, to: Format) -> int:
    """A subnormal as zero of its sign."""
    return bits if bits & (to.sign - 1) >> to.mantissa << to.mantissa else bits & to.sign


def apply_exactly(name: str, codes: list[int], to: Format, mode: str = "rn", ftz: bool = False,
                  sat: bool = False,
                  relu: bool = False) -> int:
    """The code of an operation on codes, with PTX's modifiers."""
    if ftz: codes = [flushed(code, to) for code in codes]
    out = encode(operation(name, [decode(code, to) for code in codes], mode), to, mode)
    kind = decode(out, to)
    if sat:
        if kind[1] == "nan" or kind[0]: out = 0
        elif kind[1] == "inf" or kind[1] > 1: out = encode((0, Fraction(1)), to)  # type: ignore[operator]
    if relu and kind[1] != "nan" and kind[0]: out = 0
    return flushed(out, to) if ftz else out
