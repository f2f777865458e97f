"""Dropout from a counter: which elements are dropped is a function of numbers, and kept nowhere.

Protocol. `dropout(x, p, number, salt)` drops element i where a hash of i, `salt` and `number` (a word in
memory, which a captured step may change) is below p · 2³²; the others are divided by 1 − p. The hash is the
finalizer of MurmurHash3. It is plain tinygrad, and thus part of the kernel that reads x, or its gradient:
both compute the hashes again. Equal numbers give equal elements, in every run and on every device.
"""
from __future__ import annotations

from math import prod

from tinygrad import Tensor, dtypes
from tinygrad.helpers import TRAINING

from tinygrad_nv.errors import SpecError

WORD = 1 << 32
PLACE, SALT, NUMBER = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D    # odd: each a permutation of words
FINAL = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def dropout(x: Tensor, p: float, number: Tensor, salt: int = 0) -> Tensor:
    """In Context(TRAINING=1) x with a share p of its elements 0 and the others divided by 1 − p, else x.
    `number`, uint32 (1,), is that of the call in a run, as of a micro-batch; `salt` tells calls of one number
    apart, as layers. Raises `SpecError`."""
    if not 0 <= p < 1: raise SpecError(f"p={p}", "0 to less than 1", "correct p")
    if number.dtype != dtypes.uint32 or number.shape != (1,):
        raise SpecError(f"number of {number.dtype.name} {number.shape}", "uint32 (1,)", "make it one")
    if not TRAINING or not p: return x
    count = prod(int(extent) for extent in x.shape)
    h = Tensor.arange(count, dtype=dtypes.uint32) * PLACE + salt * SALT % WORD
    h = h ^ (number * NUMBER)
    for shift, factor in FINAL: h = (h ^ (h >> shift)) * factor
    kept = (h ^ (h >> 16)) >= int(p * WORD)
    return kept.reshape(x.shape).where(x / (1 - p), 0)
