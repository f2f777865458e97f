"""Cast, CastLike and BitCast, to narrow types and strings too.

Protocol: conversions to integers are numpy's where ONNX leaves them open. A conversion to float8, float4 or
int4 rounds the numbers and keeps them in a wider Tensor (elements.py)."""
from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.elements import (
    INTEGERS,
    MINIFLOATS,
    Narrow,
    Value,
    as_kind,
    dtype_of,
    from_numpy,
    kind_of,
    power_of_two,
    round_to_minifloat,
    to_numpy,
)
from tinygrad_nv.onnx.ops.control import tensor
from tinygrad_nv.onnx.table import op


@op("Cast", raw=True)
def cast(x: Value, to: int | str, saturate: int = 1, round_mode: str = "up") -> Value:
    """Elements of another type, named by text before opset 6."""
    if isinstance(to, str): to = int(TensorProto.DataType.Value(to.upper()))
    if TensorProto.STRING in (to, kind_of(x)): return _text(x, to)
    source = x.tensor if isinstance(x, Narrow) else tensor(x)
    if to in MINIFLOATS: return Narrow(round_to_minifloat(source.cast(dtypes.float32), to, bool(saturate)),
                                       to)
    if to == TensorProto.FLOAT8E8M0:
        return Narrow(power_of_two(source.cast(dtypes.float32), bool(saturate), round_mode), to)
    if to in INTEGERS: return as_kind(wrap_integers(source, to), to)
    return source.cast(dtype_of(to))


def wrap_integers(x: Tensor, kind: int) -> Tensor:
    """Integers modulo the number of values that a type of few bits has."""
    low, high = INTEGERS[kind]
    whole = x.cast(dtypes.int32)
    return (whole - low).bitwise_and(high - low) + low


def _text(x: Value, to: int) -> Value:
    """Numbers as text, as short as they can be told apart, and text as numbers."""
    known = np.asarray(x if isinstance(x, np.ndarray) else to_numpy(x))
    if to != TensorProto.STRING:
        return from_numpy(known.astype(str).astype(np.float64).astype(helper.tensor_dtype_to_np_dtype(to)))
    return from_numpy(known.astype(np.str_))


@op("CastLike", raw=True)
def cast_like(x: Value, like: Value, saturate: int = 1, round_mode: str = "up") -> Value:
    return cast(x, kind_of(like), saturate, round_mode)


@op("BitCast")
def bit_cast(x: Tensor, to: int) -> Tensor:
    """The same bits, read as another type of the same size."""
    if x.dtype == dtypes.bool: x = x.cast(dtypes.uint8)
    return x.cast(dtypes.bool) if dtype_of(to) == dtypes.bool else x.bitcast(dtype_of(to))
