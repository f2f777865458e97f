"""Functions of one element that tinygrad computes with fewer digits, or otherwise at infinity and NaN;
shifts, cumulative products, determinants.
"""
from __future__ import annotations

import functools

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv import elementary
from tinygrad_nv.onnx.table import op

for _name in ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Erf", "Sinh", "Softplus", "Tanh"):
    op(_name)(getattr(elementary, _name.lower()))


@op("Relu")
def relu(x: Tensor) -> Tensor: return elementary.relu(x)


@op("Elu")
def elu(x: Tensor, alpha: float = 1.0) -> Tensor: return elementary.elu(x, alpha)


@op("Selu")
def selu(x: Tensor, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
         ) -> Tensor:
    return elementary.elu(x, alpha, gamma)


@op("Celu")
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is positive, alpha · expm1(x / alpha) elsewhere."""
    return elementary.elu(x, alpha, 1.0, 1 / alpha)


@op("Mish")
def mish(x: Tensor) -> Tensor:
    """x tanh(log(1 + exp(x)))."""
    return x * elementary.tanh(elementary.softplus(x))


@op("Gelu")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or its approximation by tanh."""
    return elementary.gelu(x, approximate)


@op("HardSwish")
def hard_swish(x: Tensor) -> Tensor: return x * (x / 6 + 0.5).clamp(0, 1)


@op("Sign")
def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1. NaN stays."""
    return x.isnan().where(x, x.sign()) if x.is_floating_point() else x.sign()


@op("Shrink")
def shrink(x: Tensor, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """0 within lambd of 0, nearer to it by bias elsewhere."""
    return (x < -lambd).where(x + bias, (x > lambd).where(x - bias, 0)).cast(x.dtype)


# **** two operands ****

@op("LessOrEqual")
def at_most(x: Tensor, y: Tensor) -> Tensor: return elementary.at_most(x, y)


@op("GreaterOrEqual")
def at_least(x: Tensor, y: Tensor) -> Tensor: return elementary.at_least(x, y)


@op("Max")
def largest(*given: Tensor) -> Tensor: return functools.reduce(elementary.maximum, given)


@op("Min")
def smallest(*given: Tensor) -> Tensor: return functools.reduce(elementary.minimum, given)


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
