"""Transposition of a square of elements in registers, in C.

Protocol: `transposed(lanes)` is the text of `transpose_(vi *x)`, which turns x[0] … x[W − 1], rows of a
square of W × W words of 32 bits, into its columns: squares of 2, 4, … W exchange their halves, log2 W steps
of W permutations of two vectors.
"""
from __future__ import annotations


def transposed(lanes: int) -> str:
    """The function for vectors of so many lanes."""
    lines, half = [], 1
    while half < lanes:
        low = [j if not j & half else lanes + j - half for j in range(lanes)]
        high = [j + half if not j & half else lanes + j for j in range(lanes)]
        for i in range(lanes):
            if i & half: continue
            a, b = f"x[{i}]", f"x[{i + half}]"
            lines.append(f"{{ const vi a = {a}, b = {b}; "
                         f"{a} = __builtin_shufflevector(a, b, {', '.join(map(str, low))}); "
                         f"{b} = __builtin_shufflevector(a, b, {', '.join(map(str, high))}); }}")
        half *= 2
    return "INLINE void transpose_(vi *x) {\n" + "\n".join(lines) + "\n}"
