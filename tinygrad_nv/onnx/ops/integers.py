"""Matmuls of 8-bit integers.

Protocol. Of a matrix that is a constant, codes of both operands are multiplied by the kernels for int8 codes
(`scaled_matmul`), which add up exactly in int32 and give float32. So that this is exact too, no more than
`MOST` inputs are added up at once: 2^7 · 2^7 · 2^10 = 2^24. Codes of uint8 become int8, less 128. What codes
differ by from numbers, a − z = a' + s and b − w = b' + t, is a correction by sums of columns and of rows:

    Σ (a' + s) (b' + t) = Σ a' b' + s Σ b' + t Σ (a' + s)

Another matrix is multiplied in int32 by tinygrad.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.functional import prepare_matrix, scaled_matmul
from tinygrad_nv.onnx.elements import Value, to_numpy
from tinygrad_nv.onnx.model import Node
from tinygrad_nv.onnx.ops.control import tensor
from tinygrad_nv.onnx.ops.quantised import quantize, subtract_zero
from tinygrad_nv.onnx.table import Call, op
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import INT8, per_channel_scale

MOST = 1024     # inputs of one exact sum in float32


@dataclass(frozen=True)
class Matrix:
    """Codes b' [outputs, inputs] in parts of at most `MOST` inputs, Σ b' of each output, and t, None if 0."""
    parts: tuple[QTensor, ...]
    sums: Tensor
    offset: Tensor | None


_matrices: WeakKeyDictionary[Node, Matrix | None] = WeakKeyDictionary()     # made at a node's first call


def matrix_of(b: np.ndarray, zero: np.ndarray | None) -> Matrix | None:
    """The matrix of b [inputs, outputs] of 8 bits and a zero point, or one for each output."""
    if b.ndim != 2: return None
    shift = 128 if b.dtype == np.uint8 else 0
    codes = (b.T.astype(np.int16) - shift).astype(np.int8)
    offset = np.full(len(codes), shift, np.int32)
    if zero is not None: offset -= zero.reshape(-1).astype(np.int32)
    parts, ones = [], np.ones((len(codes), 1), np.float32)
    for first in range(0, codes.shape[1], MOST):
        part = codes[:, first:first + MOST]
        made = QTensor.of(INT8 @ per_channel_scale(), (part.shape[0], part.shape[1]),
                          {"codes": part, "scales": ones})
        parts.append(prepare_matrix(made, codes=True))
    sums = Tensor(codes.sum(1, dtype=np.int32)).realize()
    return Matrix(tuple(parts), sums, Tensor(offset).realize() if offset.any() else None)


def multiply(call: Call, a: Value, a_zero: Value, b: Value, b_zero: Value, number: int,
               zero: int) -> Tensor:
    """(a − its zero point) · (b − its zero point) in int32; b is input `number` of the node, its zero point
    input `zero`."""
    if call.node not in _matrices:
        arrays = [np.asarray(to_numpy(each)) if call.constant(number, zero) and each is not None else None
                  for each in (b, b_zero)]
        _matrices[call.node] = None if arrays[0] is None else matrix_of(arrays[0], arrays[1])
    matrix, point = _matrices[call.node], None if a_zero is None else tensor(a_zero)
    if matrix is None or (point is not None and point.numel() != 1):
        return subtract_zero(a, a_zero, row=True) @ subtract_zero(b, b_zero)
    codes, shift = tensor(a), 0
    if codes.dtype == dtypes.uint8: codes, shift = codes.bitwise_xor(128).bitcast(dtypes.int8), 128
    ends = np.cumsum([0, *(part.shape[1] for part in matrix.parts)]).tolist()
    sums = [scaled_matmul(codes[..., first:last], 1.0, part, dtype=dtypes.float32).cast(dtypes.int32)
            for part, first, last in zip(matrix.parts, ends, ends[1:], strict=False)]
    offset = shift if point is None else shift - point.reshape(()).cast(dtypes.int32)
    made = functools.reduce(Tensor.add, sums) + matrix.sums * offset
    if matrix.offset is None: return made
    return made + matrix.offset * subtract_zero(a, a_zero).sum(-1, keepdim=True)


@op("MatMulInteger", raw=True, call=True)
def matmul_integer(call: Call, a: Value, b: Value, a_zero: Value = None, b_zero: Value = None) -> Tensor:
    """A matmul of integers in int32."""
    return multiply(call, a, a_zero, b, b_zero, 1, 3)


@op("QLinearMatMul", raw=True, call=True)
def qlinear_matmul(call: Call, a: Value, a_scale: Value, a_zero: Value, b: Value, b_scale: Value,
                   b_zero: Value, y_scale: Value, y_zero: Value) -> Value:
    """A matmul of integers, requantised."""
    made = multiply(call, a, a_zero, b, b_zero, 3, 5).cast(dtypes.float32)
    rows = tensor(a_scale)
    if rows.ndim and rows.numel() > 1: rows = rows.reshape(*rows.shape, 1)
    by = rows.cast(dtypes.float32) * tensor(b_scale).cast(dtypes.float32)
    return quantize(made * by, tensor(y_scale).cast(dtypes.float32), y_zero)
