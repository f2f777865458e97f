"""Elementary functions that keep their digits near 0, and NaN and infinity, where tinygrad's do not.

Protocol. tinygrad writes tanh x as 2 σ(2 x) - 1 and asinh x as log(x + √(x² + 1)): near 0 what is left of
such a difference is rounding. Here a series in x is taken near 0, and beyond it a formula that loses nothing.
Results are within some units in the last place; NaN stays NaN. Integers are taken as float32; float16 and
bfloat16 are computed in float32. A series has as many terms as the dtype has digits.

(1 + x) - 1 is x to tinygrad's simplifier, so that corrections of a rounding, as Kahan's log1p has one, cannot
be written.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad import Tensor, dtypes

LN2 = math.log(2)


def _wide(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function in float32 or float64, its result in the dtype of floats that it was given."""
    @functools.wraps(function)
    def compute(x: Tensor) -> Tensor:
        dtype = x.dtype if dtypes.is_float(x.dtype) else dtypes.float32
        return function(x.cast(dtype if dtype == dtypes.float64 else dtypes.float32)).cast(dtype)
    return compute


def _series(x: Tensor, coefficients: Callable[[int], float], single: int, double: int) -> Tensor:
    """Σ cᵢ xⁱ by Horner's rule: so many terms in float32, and in float64."""
    terms = [coefficients(i) for i in range(double if x.dtype == dtypes.float64 else single)]
    return _polynomial(x, terms)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    made = x.const_like(coefficients[-1])
    for each in coefficients[-2::-1]: made = made * x + each
    return made


def _odd(x: Tensor, of_absolute: Tensor) -> Tensor:
    """An odd function that is x near 0, of its values for |x|."""
    tiny = 1e-9 if x.dtype == dtypes.float64 else 1e-5
    return (x.abs() < tiny).where(x, (x < 0).where(-of_absolute, of_absolute))


# **** NaN ****

def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The larger one, NaN where one of them is."""
    return (x.isnan() | (x > y)).where(x, y) if dtypes.is_float(x.dtype) else x.maximum(y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    """The smaller one, NaN where one of them is."""
    return (x.isnan() | (x < y)).where(x, y) if dtypes.is_float(x.dtype) else x.minimum(y)


def order_key(x: Tensor, nan_last: bool = True) -> Tensor:
    """Integers in the order of x: -0 and 0 are one number, NaN comes after infinity, or before -infinity."""
    if x.dtype == dtypes.bool: return x.cast(dtypes.uint8)
    if not dtypes.is_float(x.dtype): return x
    double = x.dtype == dtypes.float64
    wide, whole = (dtypes.float64, dtypes.int64) if double else (dtypes.float32, dtypes.int32)
    bits = (x == 0).where(0, x.cast(wide)).bitcast(whole)
    most = int(whole.max)
    return x.isnan().where(most if nan_last else -most, (bits < 0).where(bits ^ most, bits))


def amax(x: Tensor, axis: Any = None, keepdim: bool = False) -> Tensor:
    """The largest element, NaN where there is one."""
    return _with_nan(x, x.max(axis, keepdim=keepdim), axis, keepdim)


def amin(x: Tensor, axis: Any = None, keepdim: bool = False) -> Tensor:
    """The smallest element, NaN where there is one."""
    return _with_nan(x, x.min(axis, keepdim=keepdim), axis, keepdim)


def _with_nan(x: Tensor, made: Tensor, axis: Any, keepdim: bool) -> Tensor:
    if not dtypes.is_float(x.dtype): return made
    return x.isnan().any(axis, keepdim=keepdim).where(math.nan, made)


def argmax(x: Tensor, axis: int | None = None, keepdim: bool = False) -> Tensor:
    """The first place of the largest element, or of NaN."""
    return order_key(x).argmax(axis, keepdim=keepdim)


def argmin(x: Tensor, axis: int | None = None, keepdim: bool = False) -> Tensor:
    """The first place of the smallest element, or of NaN."""
    return order_key(x, nan_last=False).argmin(axis, keepdim=keepdim)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """The elements in order, NaN as the largest, and where each was: equal ones in the order they had."""
    if not x.ndim: return x, x.const_like(0, dtypes.int32)
    places = order_key(x).sort(dim, descending)[1]
    return x.gather(dim, places), places


def at_most(x: Tensor, y: Tensor | float) -> Tensor:
    """x ≤ y, which is false of NaN. tinygrad has it as not x > y."""
    return (x < y) | (x == y) if dtypes.is_float(x.dtype) else x <= y


def at_least(x: Tensor, y: Tensor | float) -> Tensor:
    """x ≥ y, which is false of NaN."""
    return (x > y) | (x == y) if dtypes.is_float(x.dtype) else x >= y


# **** exponentials and logarithms ****

@_wide
def log1p(x: Tensor) -> Tensor:
    """log(1 + x), near 0 as 2 atanh(x / (2 + x))."""
    near = (x > -0.3) & (x < 0.5)
    s = near.where(x, 0.0) / near.where(2 + x, 1.0)
    return near.where(2 * s * _series(s * s, lambda k: 1 / (2 * k + 1), 7, 13), (1 + x).log())


@_wide
def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    near = x.abs() < 0.5
    small = near.where(x, 0.0)
    return near.where(small * _series(small, lambda k: 1 / math.factorial(k + 1), 9, 16), x.exp() - 1)


@_wide
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    negative = x < 0     # the slope of x.abs() at 0 is 0
    return negative.where(0.0, x) + log1p(negative.where(x, -x).exp())


def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """scale · x where x is positive, scale · alpha · expm1(input_scale · x) elsewhere."""
    return (x > 0).where(x * scale, expm1((x > 0).where(0, x) * input_scale) * (alpha * scale))


def relu(x: Tensor) -> Tensor:
    """x where it is positive, 0 elsewhere. NaN stays."""
    return at_most(x, 0).where(0, x)


# **** hyperbolic functions ****

@_wide
def tanh(x: Tensor) -> Tensor:
    """A series near 0, and 2 σ(2 x) - 1 beyond."""
    near = x.abs() < 0.25
    small = near.where(x, 0.0)
    return near.where(small * _series(small * small, TANH.__getitem__, 6, 12), x.tanh())


def _tanh_series(number: int) -> list[float]:
    """The coefficients of x, x³, …: tanh' = 1 - tanh²."""
    made = [1.0]
    for k in range(1, number):
        made.append(-sum(made[i] * made[k - 1 - i] for i in range(k)) / (2 * k + 1))
    return made


TANH = _tanh_series(12)


@_wide
def sinh(x: Tensor) -> Tensor:
    """e (e + 2) / (2 e + 2) with e = expm1(|x|); exp(|x| / 2)² / 2 where that is as near."""
    a = x.abs()
    large, half = a > 30, (a / 2).exp()
    e = expm1(large.where(0.0, a))
    return _odd(x, large.where(half / 2 * half, e * (e + 2) / (2 * e + 2)))


@_wide
def cosh(x: Tensor) -> Tensor:
    """(e + 1 / e) / 2 with e = exp(|x|), of exp(|x| / 2), which does not overflow before cosh does."""
    half = (x.abs() / 2).exp()
    return half / 2 * half + 0.5 / half / half


@_wide
def asinh(x: Tensor) -> Tensor:
    """log1p(|x| + x² / (1 + √(x² + 1))), and log |x| + log 2 where that is as near."""
    a = x.abs()
    large = a > 1e9
    inside = large.where(1.0, a)
    square = inside * inside
    made = log1p(inside + square / (1 + (square + 1).sqrt()))
    return _odd(x, large.where(large.where(a, 1.0).log() + LN2, made))


@_wide
def acosh(x: Tensor) -> Tensor:
    """log1p(t + √t √(t + 2)) with t = x - 1, and log x + log 2 where that is as near."""
    large = x > 1e9
    t = large.where(1.0, x - 1)
    return large.where(x.log() + LN2, log1p(t + t.sqrt() * (t + 2).sqrt()))


@_wide
def atanh(x: Tensor) -> Tensor:
    """log1p(2 |x| / (1 - |x|)) / 2."""
    a = x.abs()
    return _odd(x, log1p(2 * a / (1 - a)) / 2)


# **** angles ****

@_wide
def atan(x: Tensor) -> Tensor:
    """A series in tan a with a within π / 8 of 0: of |x| or 1 / |x|, less π / 4 where that is nearer."""
    a = x.abs()
    beyond = a > 1
    tangent = beyond.where(1 / beyond.where(a, 1.0), a)
    turned = tangent > math.tan(math.pi / 8)
    t = turned.where((tangent - 1) / (tangent + 1), tangent)
    made = t * _series(t * t, lambda k: (-1) ** k / (2 * k + 1), 10, 21) + turned.where(math.pi / 4, 0.0)
    return _odd(x, beyond.where(math.pi / 2 - made, made))


@_wide
def asin(x: Tensor) -> Tensor:
    """The angle whose sine is x, by its tangent."""
    return atan(x / ((1 - x) * (1 + x)).sqrt())


@_wide
def acos(x: Tensor) -> Tensor:
    """The angle whose cosine is x, by the tangent of its half."""
    return 2 * atan(((1 - x) / (1 + x)).sqrt())


# **** the error function ****

@_wide
def erf(x: Tensor) -> Tensor:
    """2 / √π ∫ exp(-t²) dt from 0 to x. In float64 exp(-x²) times a series of positive terms; beyond 6 it is
    1. In float32 that near 0, and tinygrad's formula beyond."""
    double = x.dtype == dtypes.float64
    near = x.abs() < (6.0 if double else 0.5)
    small = near.where(x, 0.0)
    square = small * small
    series = _series(square, lambda k: 2 ** k / math.prod(range(1, 2 * k + 2, 2)), 8, 140)
    made = small * (-square).exp() * (2 / math.sqrt(math.pi)) * series
    far = (x < 0).where(-1.0, x.isnan().where(x, 1.0)) if double else x.erf()
    return near.where(made, far)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or its approximation by tanh. tinygrad's erf is one of float32."""
    if approximate != "none" or x.dtype != dtypes.float64: return x.gelu(approximate)
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
