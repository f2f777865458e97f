"""Places where tensor-core instructions keep matrix elements: registers, shared memory, sparsity metadata.

Every function gives index arrays, computed by formula; csrc/mma.c and csrc/wgmma.c use the same formulas. In
all of them a lane of a warp is 4 * g + q (g < 8, q < 4), and a 32-bit register holds E = 32 / bits elements,
the first in the low bits. Rows are those of the warp's part: of a wgmma, warp p has rows 16 p .. 16 p + 15.
"""
from __future__ import annotations

from typing import Literal

import numpy as np

LANES = 32
SPANS = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes of a swizzle's span → its code in a descriptor
Major = Literal["k", "mn"]


def a_fragment(bits: int, m: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and k of A's elements for an m x k operand (m 8 or 16) of elements of `bits`: two int arrays
    [register, lane, element]. f64 (bits 64) has registers of one element."""
    per = max(32 // bits, 1)
    register, lane, element = np.ogrid[:m * k // LANES // per, :LANES, :per]
    tall = m // 8
    row = lane // 4 + 8 * (register % tall) + 0 * element
    return row, per * (lane % 4) + element + 4 * per * (register // tall)


def b_fragment(bits: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """k and column of B's elements for a k x 8 operand: two int arrays [register, lane, element]."""
    per = max(32 // bits, 1)
    register, lane, element = np.ogrid[:k * 8 // LANES // per, :LANES, :per]
    depth = per * (lane % 4) + element + 4 * per * register
    return depth, lane // 4 + 0 * depth


def c_fragment(m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of an m x n accumulator of 32-bit (or 64-bit) elements: two int arrays [register, lane].
    For 16-bit accumulators registers 2r and 2r + 1 are the low and high halves of register r."""
    register, lane = np.ogrid[:m * n // LANES, :LANES]
    tall = m // 8
    row = lane // 4 + 8 * (register // 2 % tall)
    return row, 8 * (register // (2 * tall)) + 2 * (lane % 4) + register % 2


def matrix_fragment(transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the 8 x 8 matrix of 16-bit elements that ldmatrix and stmatrix move: two int arrays
    [lane, half]."""
    lane, half = np.ogrid[:LANES, :2]
    row, column = lane // 4 + 0 * half, 2 * (lane % 4) + half
    return (column, row) if transposed else (row, column)


# **** shared memory ****

def swizzle(address: np.ndarray | int, span: int) -> np.ndarray | int:
    """The place of byte `address` of shared memory under a swizzle of `span` bytes (0, 32, 64, 128): bits
    4 .. 6 are XORed with bits 7 .. 9, as many of them as the span has."""
    return address ^ (((address >> 7) & (max(span // 16, 1) - 1)) << 4)


def descriptor(start: int, leading: int, stride: int, span: int, base_offset: int = 0) -> int:
    """A wgmma matrix descriptor: start address and leading and stride offsets in bytes (18 bits each,
    multiples of 16), swizzle span in bytes."""
    fields = [(x & 0x3ffff) >> 4 for x in (start, leading, stride)]
    return fields[0] | fields[1] << 16 | fields[2] << 32 | base_offset << 49 | SPANS[span] << 62


def matrix_offset(mn: np.ndarray, k: np.ndarray, major: Major, span: int, size: int, leading: int,
                  stride: int) -> np.ndarray:
    """Bytes from a descriptor's start to element (mn, k), before the swizzle; elements of `size` bytes.
    `leading` and `stride` are the descriptor's offsets."""
    per = 16 // size
    if major == "k":
        if not span: return mn // 8 * stride + mn % 8 * 16 + k // per * leading + k % per * size
        return mn // 8 * stride + mn % 8 * span + k * size // span * leading + k * size % span
    if not span: return mn // per * stride + mn % per * size + k % 8 * 16 + k // 8 * leading
    return mn * size % span + mn * size // span * leading + k % 8 * span + k // 8 * stride


# **** sparsity ****

def metadata_place(bits: int, k: int, row: int, group: int, selector: int = 0) -> tuple[int, int]:
    """The lane, and the lowest of the four bits of its metadata register, that describe group `group` of a
    row. A group is 4 elements along k (2 for 32-bit elements, 8 for 4-bit ones)."""
    groups = k // {32: 2, 4: 8}.get(bits, 4)
    lanes = groups // 4  # of each four
    if bits >= 16: return 4 * (row % 8) + lanes * selector + group // 4, 16 * (row // 8) + 4 * (group % 4)
    pair = selector if lanes == 2 else group // 8
    return 4 * (row % 8) + 2 * pair + row // 8, 4 * (group % 8)
