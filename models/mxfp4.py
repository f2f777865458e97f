"""MXFP4 as numbers: codes of four bits, the first in the lower ones, and for each 32 of a row a power of two.

Source: OCP Microscaling Formats (MX) specification, 5.3.3 and 5.4.1.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.quant.floats import narrow_bfloat16
from tinygrad_nv.quant.types import E2M1, MXFP4

GROUP = MXFP4.scale.columns
OFFSET = 127    # of a scale's exponent


def numbers(codes: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """Bits of bfloat16, which holds them exactly, [rows, columns], of codes [rows, bytes] and scales [rows,
    groups]."""
    values = np.array(E2M1.values, np.float32)[np.stack([codes & 15, codes >> 4], -1)]
    powers = scales.astype(np.int32)[..., None] - OFFSET
    with np.errstate(over="ignore"):    # beyond 2^128 inf, as in transformers
        made = np.ldexp(values.reshape(*scales.shape, GROUP), powers).reshape(len(codes), -1)
    return narrow_bfloat16(np.ascontiguousarray(made[:, :columns]))
