"""Matrices that a graph dequantises for one matmul: Cast(codes) · scale, read as codes.

Protocol: `quantised(spec, matrix)` is the spec of a matmul whose right operand is such a value, with codes
and scales in memory; None of another. The codes are int8, rows along k; a scale is one number, or one for
each row, in float32, where it matters least that kernels may leave an element unrounded. Tensor programs and
graphs of torch have such values; models whose matrices are quantised call `quant_matmul`, with one prepared
for it.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.patterns.contraction import is_storage
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand

if TYPE_CHECKING:
    from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec


def match_quantised(spec: GemmSpec, matrix: UOp) -> tuple[QuantGemmSpec, tuple[UOp, UOp]] | None:
    """The spec, and what takes the matrix's place among the inputs."""
    if (found := _codes_and_scales(matrix)) is None or spec.batch or spec.parts > 1 \
            or spec.a.dtype != dtypes.float32 or spec.b != Operand(dtypes.float32, spec.k, 1): return None
    codes, scales = found
    if codes.max_numel() != spec.n * spec.k or scales.max_numel() not in (1, spec.n): return None
    # a graph without such a matrix opens no formats
    from tinygrad_nv.quant.types import INT8, QType, Scale
    from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
    rows = 0 if scales.max_numel() == 1 else 1
    return QuantGemmSpec(spec, QType(INT8, Scale(rows, 0, scales.dtype))), found


def is_dequantised(matrix: UOp) -> bool:
    """Whether a matrix is Cast(int8) · scale, of all elements or of each row."""
    return _codes_and_scales(matrix) is not None


def _codes_and_scales(matrix: UOp) -> tuple[UOp, UOp] | None:
    if matrix.op is not Ops.MUL: return None
    for wide, factor in (matrix.src, matrix.src[::-1]):
        codes, scales = _dense(wide.src[0]) if wide.op is Ops.CAST else wide, _dense(factor)
        if codes.dtype == dtypes.int8 and is_storage(codes) and is_storage(scales) \
                and wide.shape == matrix.shape and scales.dtype == matrix.dtype and _of_rows(factor, matrix):
            return codes, scales
    return None


def _dense(x: UOp) -> UOp:
    while x.op is Ops.RESHAPE: x = x.src[0]
    return x


def _of_rows(factor: UOp, matrix: UOp) -> bool:
    """Whether a factor is the same for all columns of a matrix."""
    return not factor.shape or (len(factor.shape) <= len(matrix.shape) and factor.shape[-1] == 1)
