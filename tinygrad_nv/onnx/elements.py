"""Types of elements: ONNX's, tinygrad's and numpy's.

Protocol. A value is a Tensor where tinygrad has its type. A type that it lacks, or has not on every device
(float8, float4, int4, int2), is `Narrow`: a Tensor of a wider type that holds the same numbers, and the name
of the narrow type. Strings are numpy arrays of objects. A sequence is a list, an optional without a value is
None. A numpy array of numbers is a value known to the host (host.py).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from onnx import TensorProto, helper
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType, strong_dtype

from tinygrad_nv.errors import OnnxError

PLAIN: dict[int, DType] = {
    TensorProto.FLOAT: dtypes.float32, TensorProto.DOUBLE: dtypes.float64,
    TensorProto.FLOAT16: dtypes.float16, TensorProto.BFLOAT16: dtypes.bfloat16,
    TensorProto.INT8: dtypes.int8, TensorProto.INT16: dtypes.int16, TensorProto.INT32: dtypes.int32,
    TensorProto.INT64: dtypes.int64, TensorProto.UINT8: dtypes.uint8, TensorProto.UINT16: dtypes.uint16,
    TensorProto.UINT32: dtypes.uint32, TensorProto.UINT64: dtypes.uint64, TensorProto.BOOL: dtypes.bool}
TYPES = {dtype: kind for kind, dtype in PLAIN.items()}
# those of float8 that tinygrad has: accepted, and computed as the wider Tensors below
FLOAT8: dict[DType, int] = {
    dtypes.fp8e4m3: TensorProto.FLOAT8E4M3FN, dtypes.fp8e4m3fnuz: TensorProto.FLOAT8E4M3FNUZ,
    dtypes.fp8e5m2: TensorProto.FLOAT8E5M2, dtypes.fp8e5m2fnuz: TensorProto.FLOAT8E5M2FNUZ}


@dataclass(frozen=True)
class Minifloat:
    """A float of few bits: bits of exponent and mantissa, the exponent of the smallest normal number, the
    largest finite number, and what overflow becomes without saturation."""
    mantissa: int
    least: int
    largest: float
    overflow: float


MINIFLOATS: dict[int, Minifloat] = {
    TensorProto.FLOAT8E4M3FN: Minifloat(3, -6, 448.0, float("nan")),
    TensorProto.FLOAT8E4M3FNUZ: Minifloat(3, -7, 240.0, float("nan")),
    TensorProto.FLOAT8E5M2: Minifloat(2, -14, 57344.0, float("inf")),
    TensorProto.FLOAT8E5M2FNUZ: Minifloat(2, -15, 57344.0, float("nan")),
    TensorProto.FLOAT4E2M1: Minifloat(1, 0, 6.0, 6.0)}
# without a negative zero; an infinity becomes NaN
UNSIGNED_ZERO = (TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ)
INTEGERS: dict[int, tuple[int, int]] = {TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
                                        TensorProto.INT2: (-2, 1), TensorProto.UINT2: (0, 3)}
NARROW: dict[int, DType] = {
    **dict.fromkeys((*MINIFLOATS, TensorProto.FLOAT8E8M0), dtypes.float32),
    **{kind: dtypes.int8 if low else dtypes.uint8 for kind, (low, _) in INTEGERS.items()}}


@dataclass(frozen=True)
class Narrow:
    """Numbers of a narrow type in a Tensor of a wider one."""
    tensor: Tensor
    kind: int


Value: TypeAlias = "Tensor | Narrow | np.ndarray | list[Any] | None"


def name_of(kind: int) -> str:
    """ONNX's name of a type of elements."""
    return str(TensorProto.DataType.Name(kind)) if kind in TensorProto.DataType.values() else str(kind)


def dtype_of(kind: int) -> DType:
    """The dtype of Tensors that hold a type of elements."""
    if kind in PLAIN: return PLAIN[kind]
    if kind in NARROW: return NARROW[kind]
    raise OnnxError(f"elements of type {name_of(kind)}", "numbers that are real: floats, integers, bool",
                    "convert the model")


def kind_of(x: Value) -> int:
    """ONNX's type of the elements of a value."""
    if isinstance(x, Narrow): return x.kind
    if isinstance(x, Tensor): return TYPES[strong_dtype(x.dtype)]
    if isinstance(x, np.ndarray):
        return TensorProto.STRING if x.dtype.kind in "OU" else int(helper.np_dtype_to_tensor_dtype(x.dtype))
    raise OnnxError(f"a {'sequence' if isinstance(x, list) else 'missing value'}", "a tensor")


def numeric(x: np.ndarray | np.generic) -> bool:
    """Whether an array's elements are numbers that numpy itself has; ml_dtypes gives some of its types the
    kind of floats."""
    return x.dtype.kind in "biuf" and x.dtype.isbuiltin == 1


def plain(x: Value) -> Tensor:
    """The Tensor of a value, of narrow elements too. Raises `OnnxError` for sequences and strings."""
    made = from_numpy(x) if isinstance(x, np.ndarray) else x
    if isinstance(made, Narrow): return made.tensor
    if not isinstance(made, Tensor): raise OnnxError(f"a {type(made).__name__}", "a tensor")
    return made


def like(x: Tensor, other: Value) -> Tensor | Narrow:
    """A Tensor of elements that were moved, in the narrow type of another value, if it has one."""
    if isinstance(other, np.ndarray): other = from_numpy(other)
    return Narrow(x, other.kind) if isinstance(other, Narrow) else x


def as_kind(x: Tensor, kind: int) -> Tensor | Narrow:
    """A Tensor of numbers that a type has, as a value of the type."""
    x = x.cast(dtype_of(kind))
    return Narrow(x, kind) if kind in NARROW else x


def from_numpy(x: np.ndarray, folds: bool = True) -> Value:
    """A value of a numpy array, which may have a dtype of ml_dtypes. One element becomes a constant of
    the graph of UOps, if it `folds`."""
    kind = TensorProto.STRING if x.dtype.kind in "OUS" else int(helper.np_dtype_to_tensor_dtype(x.dtype))
    if kind == TensorProto.STRING: return _text(x)
    if kind in NARROW: return Narrow(from_numpy(x.astype(_wide(dtype_of(kind)))), kind)
    if kind == TensorProto.BFLOAT16:
        bits = np.ascontiguousarray(x).view(np.uint16).reshape(x.shape)
        return Tensor(bits).bitcast(dtypes.bfloat16)
    dtype = dtype_of(kind)
    if x.size == 1 and folds: return Tensor(x.item(), dtype=dtype).reshape(x.shape)
    return Tensor(np.ascontiguousarray(x).reshape(x.shape), dtype=dtype)


def to_numpy(x: Any) -> Any:
    """Returns a value as numpy has it: narrow types and bfloat16 as ml_dtypes, sequences as lists."""
    if isinstance(x, list): return [to_numpy(each) for each in x]
    if isinstance(x, Narrow): return to_numpy(x.tensor).astype(helper.tensor_dtype_to_np_dtype(x.kind))
    if isinstance(x, Tensor):
        if x.dtype != dtypes.bfloat16: return x.numpy()
        exact = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
        return x.bitcast(dtypes.uint16).numpy().view(exact)
    return x


def _text(x: np.ndarray) -> np.ndarray:
    """Strings as objects."""
    made = np.empty(x.size, dtype=object)
    made[:] = [each.decode() if isinstance(each, bytes) else str(each) for each in x.reshape(-1)]
    return made.reshape(x.shape)


def _wide(dtype: DType) -> np.dtype:
    return np.dtype({dtypes.float32: "float32", dtypes.int8: "int8", dtypes.uint8: "uint8"}[dtype])


def round_to_minifloat(x: Tensor, kind: int, saturate: bool = True) -> Tensor:
    """float32 numbers as a minifloat has them, ties to even. What is too large becomes the largest number if
    it saturates, and otherwise infinity or NaN (the tables of ONNX's Cast)."""
    spec = MINIFLOATS[kind]
    exponent = ((x.bitcast(dtypes.int32) >> 23) & 255).sub(127).maximum(spec.least)
    # 2 to the exponent of the last place, which float32 has as a normal number
    place = ((exponent - spec.mantissa + 127) << 23).bitcast(dtypes.float32)
    near = (x / place).round() * place
    infinite = spec.largest if saturate else spec.overflow
    over = x.isinf() | (near.abs() > spec.largest)
    near = over.where((x < 0).where(-infinite, infinite), near)
    if kind in UNSIGNED_ZERO: near = (near == 0).where(0.0, near)
    return x.isnan().where(float("nan"), near)


def power_of_two(x: Tensor, saturate: bool, mode: str) -> Tensor:
    """float32 numbers as FLOAT8E8M0 has them: a power of two; `mode` is up, down or nearest."""
    bits = x.bitcast(dtypes.int32)
    exponent, mantissa = (bits >> 23) & 255, bits & 0x7FFFFF
    least = {"up": 1, "nearest": 0x400000, "down": 0x800000}[mode]     # the mantissa that is rounded up
    more = (mantissa >= least) & (exponent < (254 if saturate else 255))
    exponent = exponent + more.cast(dtypes.int32)
    number = (exponent == 0).where(2.0 ** -127, (exponent << 23).bitcast(dtypes.float32))
    return (exponent >= 255).where(float("nan"), number)
