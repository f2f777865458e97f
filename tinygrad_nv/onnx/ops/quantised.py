"""Quantised integers and floats: QuantizeLinear, DequantizeLinear, and ops on quantised operands.

Protocol: a scale and a zero point are one number, one for each element along `axis`, or one for each block of
`block_size` elements along it. Integers are clipped to their type, after rounding to the nearest even.
"""
from __future__ import annotations

from typing import Any

from onnx import TensorProto
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import (
    INTEGERS,
    MINIFLOATS,
    Narrow,
    Value,
    as_kind,
    dtype_of,
    kind_of,
    name_of,
    plain,
    round_to_minifloat,
)
from tinygrad_nv.onnx.ops.control import tensor
from tinygrad_nv.onnx.table import find, op

WHOLE = (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.INT32)


def along(x: Tensor, value: Tensor, axis: int, block: int) -> Tensor:
    """A scale or a zero point that is broadcast to x."""
    if value.ndim == 0 or (value.numel() == 1 and not block): return value.reshape(())
    axis %= x.ndim
    if not block: return value.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    made = value.repeat_interleave(block, axis)
    return made.shrink(tuple((0, n) for n in x.shape))


@op("QuantizeLinear", raw=True)
def quantize(x: Value, scale: Value, zero: Value = None, axis: int = 1, saturate: int = 1,
             block_size: int = 0, output_dtype: int = 0, precision: int = 0) -> Value:
    """x / scale + zero point, rounded to a type of few bits."""
    kind = kind_of(zero) if zero is not None else output_dtype or TensorProto.UINT8
    given, by = tensor(x), tensor(scale)
    dtype = dtype_of(precision) if precision else by.dtype
    divided = given.cast(dtype) / along(given, by.cast(dtype), axis, block_size)
    if kind in MINIFLOATS: return Narrow(round_to_minifloat(divided.cast(dtypes.float32), kind,
                                                            bool(saturate)), kind)
    if kind not in (*WHOLE, *INTEGERS):
        raise OnnxError(f"quantised elements of type {name_of(kind)}", "integers, float8, float4")
    whole = divided.cast(dtypes.float32).round().cast(dtypes.int32)
    if zero is not None: whole = whole + along(given, plain(zero).cast(dtypes.int32), axis, block_size)
    return as_kind(whole.clamp(*limits(kind)), kind)


def limits(kind: int) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    return INTEGERS[kind] if kind in INTEGERS else (int(dtype_of(kind).min), int(dtype_of(kind).max))


@op("DequantizeLinear", raw=True)
def dequantize(x: Value, scale: Value, zero: Value = None, axis: int = 1, block_size: int = 0,
               output_dtype: int = 0) -> Tensor:
    """(x - zero point) · scale in the scale's type."""
    given, by = plain(x), tensor(scale)
    dtype = dtype_of(output_dtype) if output_dtype else by.dtype
    if zero is not None and kind_of(x) not in MINIFLOATS:
        given = given.cast(dtypes.int32) - along(given, plain(zero).cast(dtypes.int32), axis, block_size)
    made = given.cast(dtypes.float32) * along(given, by, axis, block_size).cast(dtypes.float32)
    return made.cast(dtype)


@op("DynamicQuantizeLinear")
def dynamic(x: Tensor) -> tuple[Value, ...]:
    """A uint8 scale and zero point from the range of x, 0 included."""
    low, high = x.min().minimum(0), x.max().maximum(0)
    scale = (high - low) / 255
    scale = (scale == 0).where(1.0, scale)
    zero = (-low / scale).round().clamp(0, 255).cast(dtypes.uint8)
    return quantize(x, scale, zero), scale, zero


def subtract_zero(x: Value, zero: Value, row: bool = False) -> Tensor:
    """x - zero point as int32. A zero point for each row of x is one column."""
    made = plain(x).cast(dtypes.int32)
    if zero is None: return made
    offset = plain(zero).cast(dtypes.int32)
    return made - (offset.reshape(*offset.shape, 1) if row and offset.ndim and offset.numel() > 1 else offset)


def convolve(*operands: Tensor | None, **attributes: Any) -> Tensor:
    """tinygrad's convolution."""
    found = find("", "Conv", 22)
    assert found is not None
    made: Tensor = found.function(*operands, **attributes)
    return made


@op("ConvInteger", raw=True)
def conv_integer(x: Value, w: Value, x_zero: Value = None, w_zero: Value = None, **attributes: Any) -> Tensor:
    """A convolution of integers in int32."""
    return convolve(subtract_zero(x, x_zero), _by_channel(w, w_zero), **attributes).cast(dtypes.int32)


def _by_channel(w: Value, zero: Value) -> Tensor:
    """Weights less their zero point, which may be one for each output channel."""
    if zero is not None and plain(zero).numel() > 1: zero = plain(zero).reshape(-1, 1, 1, 1)
    return subtract_zero(w, zero)


@op("QLinearConv", raw=True)
def qlinear_conv(x: Value, x_scale: Value, x_zero: Value, w: Value, w_scale: Value, w_zero: Value,
                 y_scale: Value, y_zero: Value, bias: Value = None, **attributes: Any) -> Value:
    """A convolution of integers, requantised; a scale may be one for each output channel."""
    made = convolve(subtract_zero(x, x_zero), _by_channel(w, w_zero), None if bias is None else plain(bias),
                     **attributes)
    by = tensor(w_scale)
    if by.numel() > 1: by = by.reshape(1, -1, *[1] * (made.ndim - 2))
    return quantize(made.cast(dtypes.float32) * tensor(x_scale) * by, y_scale, y_zero)
