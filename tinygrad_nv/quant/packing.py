"""Codes of few bits in bytes, with NumPy: as types.py lays them.

Column k of b bits is in bits b · (k mod 8/b) of byte k // (8/b) of its row: the first column is lowest.
"""
from __future__ import annotations

import numpy as np


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes below 2^bits, uint8 [N, K], as bytes [N, K · bits / 8]; bits is 1, 2, 4 or 8."""
    if bits == 8: return np.ascontiguousarray(codes, np.uint8)
    each = 8 // bits
    made = np.zeros((len(codes), codes.shape[1] // each), np.uint8)
    for i in range(each): made |= codes[:, i::each].astype(np.uint8) << np.uint8(i * bits)
    return made


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """`packed` undone: uint8 [N, K]."""
    if bits == 8: return data
    each, mask = 8 // bits, np.uint8((1 << bits) - 1)
    made = np.empty((len(data), data.shape[1] * each), np.uint8)
    for i in range(each): made[:, i::each] = data >> np.uint8(i * bits) & mask
    return made


def planes(codes: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """`codes`, and `high` of 3, 5 and 6 bits, of codes below 2^bits, uint8 [N, K]."""
    low = {3: 2, 5: 4, 6: 4}.get(bits, bits)
    made = {"codes": packed(codes & np.uint8((1 << low) - 1), low)}
    if low < bits: made["high"] = packed(codes >> np.uint8(low), bits - low)
    return made
