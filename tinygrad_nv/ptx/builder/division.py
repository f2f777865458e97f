"""Division of integers by a constant, in numbers. ptxas has no short way for it, not even for powers of two,
and makes each `div` and `rem` about 15 instructions with a reciprocal; values.py emits shifts, or a product
(Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
"""
from __future__ import annotations

BITS = 32


def power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, …"""
    return number > 0 and number & number - 1 == 0


def divisible(kind: str, divisor: int) -> bool:
    """Whether a register of this type (u32, s32, …) can be divided by it without a division."""
    return (kind == "u32" and divisor > 0) or power_of_two(divisor)


def multiplier(divisor: int) -> tuple[int, int]:
    """m and s, so that floor(n · m / 2^(32 + s)) is floor(n / divisor) for every n below 2^32; the smallest s
    for which m has 32 bits, else m of 33."""
    most = (divisor - 1).bit_length()
    for shift in range(most + 1):
        made = -(-(1 << BITS + shift) // divisor)
        error = made * divisor - (1 << BITS + shift)
        if error <= 1 << shift and made < 1 << BITS: return made, shift
    return -(-(1 << BITS + most) // divisor), most
