"""Sums of FP8 on Hopper, promoted: tensor cores keep few digits, so they sum short stretches alone.

A wgmma of FP8 keeps 13 bits of mantissa of each sum (units.py). Over K elements the error grows with K:
DeepSeek-V3 (arXiv 2412.19437, 3.3.2) saw about 2 % at K = 4096. Two levels bound it: tensor cores sum
`every` elements from zero, and CUDA cores add that, times the scale of its block, to a float32 accumulator by
one FMA.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.numerics.semantics import exact
from tinygrad_nv.numerics.semantics.formats import F32, Codes, Values, decode, encode
from tinygrad_nv.numerics.semantics.units import Unit, dot

PROMOTE_EVERY = 128     # elements between promotions, DeepSeek-V3's: the length of a block with one scale


def promote_dot(unit: Unit, a: Codes, b: Codes, scales: Values | None = None,
                every: int = PROMOTE_EVERY) -> Codes:
    """A (M, K) B (K, N) as float32 codes: `unit` from zero for each `every` elements, then one FMA with the
    scale of the block, float32 values (K / every, M, N), 1 by default."""
    total = np.zeros((a.shape[0], b.shape[1]), np.uint32)
    for number, k in enumerate(range(0, a.shape[1], every)):
        part = dot(unit, a[:, k:k + every], b[k:k + every], np.zeros_like(total))
        scale = np.ones(total.shape) if scales is None else scales[number]
        total = encode(exact.fma(decode(part, F32), scale, decode(total, F32)), F32)
    return total
