"""Division of integers by a constant, without a division: ptxas has none of its own, not even for powers of
two, and makes each `div` and `rem` about 15 instructions with a reciprocal.

Protocol: `quotient(n, d)` is n / d, rounded towards zero as `div` does it, of every n, where `divisible` says
so: d is a power of two, or n has 32 bits without a sign (Granlund and Montgomery, "Division by invariant
integers using multiplication", 1994).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from tinygrad_nv.ptx.isa.operands import width

if TYPE_CHECKING: from tinygrad_nv.ptx.builder.values import Value

BITS = 32


def power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, …"""
    return number > 0 and number & number - 1 == 0


def divisible(kind: str, divisor: int) -> bool:
    """Whether a register of this type (u32, s32, …) can be divided so."""
    return kind == "u32" and divisor > 0 or power_of_two(divisor)


def multiplier(divisor: int) -> tuple[int, int]:
    """m and s, so that floor(n · m / 2^(32 + s)) is floor(n / divisor) for every n below 2^32; the smallest s
    for which m has 32 bits, else m of 33."""
    most = (divisor - 1).bit_length()
    for shift in range(most + 1):
        made = -(-(1 << BITS + shift) // divisor)
        error = made * divisor - (1 << BITS + shift)
        if error <= 1 << shift and made < 1 << BITS: return made, shift
    return -(-(1 << BITS + most) // divisor), most


def quotient(number: Value, divisor: int) -> Value:
    """The quotient of a register by a constant."""
    if power_of_two(divisor): return _shifted(number, divisor)
    kb = number.kernel
    factor, shift = multiplier(divisor)
    high = kb.reg("u32")
    kb.emit("mul.hi.u32", high, number, factor & (1 << BITS) - 1)
    if factor >> BITS: return (((number - high) >> 1) + high) >> shift - 1
    return high >> shift if shift else high


def _shifted(number: Value, divisor: int) -> Value:
    """By a power of two. A shift rounds down: a negative number has to be up to `divisor` - 1 more."""
    shift = divisor.bit_length() - 1
    if number.kind[0] != "s" or not shift: return number >> shift
    return (number + ((number >> width(number.kind) - 1) & divisor - 1)) >> shift
