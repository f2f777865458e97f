"""Floats that NumPy has not, as unsigned integers of their bits: bfloat16 and e4m3."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.quant.activations import E4M3_LEAST, E4M3_MAX


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 bit patterns (uint16), to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def as_float32(array: np.ndarray) -> np.ndarray:
    """A tensor of floats of a file, of which bfloat16 is uint16."""
    return widen_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest e4m3, ties to even, beyond 448 clamped: uint8."""
    clamped = np.clip(x, np.float32(-E4M3_MAX), np.float32(E4M3_MAX))
    bits = clamped.view(np.uint32)
    # 20 of 23 bits of the mantissa go; what is carried reaches the exponent by itself
    kept = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
    size = np.abs(clamped)
    normal = (kept & np.uint32(0x7FF)) - np.uint32(120 << 3)
    made = np.where(size < np.float32(E4M3_LEAST), np.rint(size * np.float32(512)).astype(np.uint32), normal)
    return (made | (bits >> np.uint32(24) & np.uint32(128))).astype(np.uint8)


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    """uint8 as float32."""
    table = np.arange(128, dtype=np.int32)
    exponent, mantissa = table >> 3, table & 7
    values = np.where(exponent == 0, np.ldexp(np.float32(mantissa), -9),
                      np.ldexp(np.float32(8 + mantissa), exponent - 10)).astype(np.float32)
    values[127] = np.nan
    both: np.ndarray = np.concatenate([values, -values])[bits]
    return both
