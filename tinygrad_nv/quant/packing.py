"""Codes of few bits in bytes, with NumPy: as types.py lays them.

Column k of b bits is in bits b · (k mod 8/b) of byte k // (8/b) of its row: the first column is lowest.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

CHUNK = 1 << 22     # codes unpacked at a time, a byte each: what is made of them stays in an L2 or L3 cache


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes below 2^bits, uint8 [N, K], as bytes [N, K · bits / 8]; bits is 1, 2, 4 or 8."""
    if bits == 8: return np.ascontiguousarray(codes, np.uint8)
    each = 8 // bits
    made = np.zeros((len(codes), codes.shape[1] // each), np.uint8)
    for i in range(each): made |= codes[:, i::each].astype(np.uint8) << np.uint8(i * bits)
    return made


def unpack(data: np.ndarray, bits: int) -> np.ndarray:
    """`pack` undone: uint8 [N, K]."""
    if bits == 8: return data
    each, mask = 8 // bits, np.uint8((1 << bits) - 1)
    made = np.empty((len(data), data.shape[1] * each), np.uint8)
    for i in range(each): made[:, i::each] = data >> np.uint8(i * bits) & mask
    return made


def planes(codes: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """`codes`, and `high` of 3, 5 and 6 bits, of codes below 2^bits, uint8 [N, K]."""
    low = {3: 2, 5: 4, 6: 4}.get(bits, bits)
    made = {"codes": pack(codes & np.uint8((1 << low) - 1), low)}
    if low < bits: made["high"] = pack(codes >> np.uint8(low), bits - low)
    return made


def fields(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` fields of 1 to 8 bits that follow each other without gaps in the bytes of a row, the
    lowest bits first: uint8 [N, count] of uint8 [N, B]."""
    whole = -(-count // 8)
    if data.shape[1] < whole * bits: data = np.pad(data, ((0, 0), (0, whole * bits - data.shape[1])))
    groups = data[:, :whole * bits].reshape(len(data), whole, bits)
    made = np.empty((len(data), whole, 8), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        field = groups[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8: field |= groups[:, :, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(field, np.uint8((1 << bits) - 1), out=made[:, :, i])
    return made.reshape(len(data), whole * 8)[:, :count]


def planes_of(rows: Callable[[int, int], np.ndarray], n: int, k: int, bits: int) -> dict[str, np.ndarray]:
    """`planes` of n rows of k codes, made of some at a time: `rows(begin, end)` are the codes of these, both
    of them multiples of 32 or n."""
    made: dict[str, np.ndarray] = {}
    step = max(32, CHUNK // k // 32 * 32)
    for begin in range(0, n, step):
        for name, data in planes(rows(begin, min(begin + step, n)), bits).items():
            if name not in made: made[name] = np.empty((n, data.shape[1]), np.uint8)
            made[name][begin:begin + len(data)] = data
    return made
