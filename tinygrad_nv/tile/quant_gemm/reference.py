"""A matmul with a quantised matrix in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.quant.tensor import dequantized
from tinygrad_nv.tile.gemm import reference as gemm
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.reference import Argument, Given, dense


def arguments(spec: QuantGemmSpec) -> tuple[Argument, ...]:
    """out, a, the matrix's buffers, x0, x1, …"""
    out, a, _, *extras = gemm.arguments(spec.gemm)
    inputs = {"order": range(spec.gemm.k)}
    return out, a, *(Argument(name, one.dtype, (dense(*one.shape),), "in", inputs.get(name), inputs.get(name))
                     for name, one in spec.buffers.items()), *extras


def reference(spec: QuantGemmSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[m, n]."""
    shaped = {name: given[name].reshape(one.shape) for name, one in spec.buffers.items()}
    b = dequantized(spec.type, spec.shape, shaped, dtypes.float32 if exact else spec.gemm.b.dtype)
    return gemm.reference(spec.gemm, {**given, "b": b.contiguous().flatten()}, exact)
