"""Arithmetic that differs from tinygrad's: shifts, remainders, powers, cumulative products, determinants."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.table import op


@op("BitShift")
def shift(x: Tensor, by: Tensor, direction: str) -> Tensor:
    """x shifted by so many bits; beyond its width nothing of x is left but its sign."""
    width = x.dtype.itemsize * 8
    wide = dtypes.uint64 if x.dtype in dtypes.uints else dtypes.int64
    inside = (by >= 0) & (by < width)
    amount = inside.where(by, 0).cast(wide)
    if direction == "LEFT": return inside.where((x.cast(wide) << amount).cast(x.dtype), 0)
    beyond = (x < 0).where(-1, 0).cast(x.dtype) if wide == dtypes.int64 else x.const_like(0)
    return inside.where((x.cast(wide) >> amount).cast(x.dtype), beyond)


@op("CumProd", host=(1,))
def cumprod(x: Tensor, axis: np.ndarray, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Products of the elements before, along a dimension."""
    d = int(axis.item()) % x.ndim
    given = x.flip(d) if reverse else x
    if exclusive:
        first = tuple((0, n - 1) if i == d else None for i, n in enumerate(x.shape))
        one = tuple(1 if i == d else n for i, n in enumerate(x.shape))
        given = given.const_like(1).shrink(tuple((0, n) for n in one)).cat(given.shrink(first), dim=d)
    made = given.cumprod(d)
    return (made.flip(d) if reverse else made).cast(x.dtype)


@op("Det", host=(0,))
def det(x: np.ndarray) -> np.ndarray:
    """Determinants of the last two dimensions."""
    return np.asarray(np.linalg.det(x), dtype=x.dtype)
