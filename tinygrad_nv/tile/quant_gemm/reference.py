"""A matmul with a quantised matrix in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.quant.layouts import unlaid
from tinygrad_nv.quant.tensor import dequantize
from tinygrad_nv.tile.gemm import reference as gemm
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec
from tinygrad_nv.tile.reference import Argument, Given, dense, gather


def arguments(spec: QuantGemmSpec) -> tuple[Argument, ...]:
    """out, a, the matrix's buffers, x0, x1, …"""
    out, a, _, *extras = gemm.arguments(spec.gemm)
    inputs = {"order": range(spec.gemm.k)}
    return out, a, *(Argument(name, one.dtype, (dense(*one.shape),), "in", inputs.get(name), inputs.get(name))
                     for name, one in spec.buffers.items()), *extras


def reference(spec: QuantGemmSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[m, n]."""
    shaped = {name: given[name].reshape(one.shape) for name, one in spec.buffers.items()}
    if spec.codes:
        codes = shaped["codes"]
        if spec.type.layout != "rows": codes = unlaid(spec.type, "codes", codes, *spec.shape)
        return gemm.reference(spec.gemm, {**given, "b": codes.contiguous().flatten()}, exact)
    wide = exact or spec.int8
    b = dequantize(spec.type, spec.shape, shaped, dtypes.float32 if wide else spec.gemm.b.dtype)
    if not spec.int8: return gemm.reference(spec.gemm, {**given, "b": b.contiguous().flatten()}, exact)
    place = gemm.arguments(spec.gemm)[1].places[0]
    x = gather(given["a"], place).float()
    if spec.type.permuted: x, b = x[:, given["order"]], b[:, given["order"]]
    dense_rows = Operand(dtypes.float32, spec.gemm.k, 1)
    floats = replace(spec.gemm, a=dense_rows, b=dense_rows)
    return gemm.reference(floats, {**given, "a": in_bytes(x).flatten(), "b": b.contiguous().flatten()}, exact)


def in_bytes(x: Tensor) -> Tensor:
    """Returns rows of float32 as they are once they have been quantised to int8."""
    blocks = x.reshape(*x.shape[:-1], -1, INT8_BLOCK).contiguous()
    d = (blocks.abs().max(-1, keepdim=True) / 127).contiguous()
    inverse = d.reciprocal()
    q = (blocks * (inverse < float("inf")).where(inverse, 0)).round()
    return (q * d).reshape(x.shape).contiguous()
