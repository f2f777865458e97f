"""Ops whose older versions differ by more than where an attribute is: broadcasting before opset 7, powers."""
from __future__ import annotations

from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.table import find, op


def _align_axis(x: Tensor, y: Tensor, axis: int | None) -> Tensor:
    """y with dimensions of 1 behind it, so that its first one is `axis` of x. Without an axis they end
    together."""
    if axis is None: return y
    return y.reshape(*y.shape, *[1] * (x.ndim - axis % x.ndim - y.ndim))


def _broadcast(name: str) -> None:
    """The op before opset 7: y is broadcast to x, from a dimension on."""
    newest = find("", name, 1 << 30)
    assert newest is not None
    op(name, since=7)(newest.function)

    @op(name)
    def old(x: Tensor, y: Tensor, broadcast: int = 0, axis: int | None = None, consumed_inputs: Any = None
            ) -> Tensor:
        made: Tensor = newest.function(x, _align_axis(x, y, axis if broadcast else None))
        return made


@op("PRelu", since=7)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x where it is positive, slope · x elsewhere."""
    return (x > 0).where(x, x * slope)


@op("PRelu")
def prelu_1(x: Tensor, slope: Tensor, consumed_inputs: Any = None) -> Tensor:
    """Computes `prelu` with a slope for each channel, or one for all."""
    return prelu(x, _align_axis(x, slope, 1 if slope.ndim == 1 and slope.numel() > 1 else None))


@op("Pow")
def power(x: Tensor, y: Tensor) -> Tensor:
    """x to the power of y, in x's type: exact for integers."""
    if x.is_floating_point(): return x.pow(y.cast(x.dtype)).cast(x.dtype)
    if y.is_floating_point():
        made = x.cast(dtypes.float64).pow(y.cast(dtypes.float64))
        near = made.round()     # what a power by logarithms has of a whole number
        return ((made - near).abs() <= near.abs() * 1e-12).where(near, made.trunc()).cast(x.dtype)
    signed = y.dtype in dtypes.sints
    left = y.abs() if signed else y
    # of greater powers those of -1, 0 and 1 alone are numbers of 64 bits
    left = (left > 63).where(62 + left % 2, left).cast(dtypes.int32)
    made, square = x.const_like(1), x
    for bit in range(6):
        made = ((left >> bit) % 2 != 0).where(made * square, made)
        square = square * square
    return (y < 0).where((x * x == 1).where(made, 0), made) if signed else made


for each in ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater"):
    _broadcast(each)
