"""Matmuls of rows with the quantised matrix of their group, in plain tinygrad (tile/reference.py).

All matrices are dequantised once: memory grows with their number, not with rows.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.quant.stack import dequantize_stack
from tinygrad_nv.tile.grouped_gemm import reference as grouped
from tinygrad_nv.tile.quant_gemm.reference import in_bytes
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.reference import Argument, Given, Results, compute_dtype, dense, gather, round_to

COLUMNS = "columns"     # the stack's order; `order` is that of rows


def arguments(spec: QuantGroupedSpec) -> tuple[Argument, ...]:
    """out, x, the stack's buffers, offsets, then those there are of order, weights, bias."""
    out, x, _, *rest = grouped.arguments(spec.grouped)
    columns = range(spec.grouped.k)
    made = [Argument(COLUMNS, one.dtype, (dense(*one.shape),), "in", columns, columns) if name == "order" else
            Argument(name, one.dtype, (dense(*one.shape),)) for name, one in spec.buffers.items()]
    return out, x, *made, *rest


def reference(spec: QuantGroupedSpec, given: Given, exact: bool = False) -> Results:
    """[rows, columns]."""
    one, wide = spec.grouped, compute_dtype(dtypes.float32, exact)
    stack = {name: given[COLUMNS if name == "order" else name].reshape(each.shape)
             for name, each in spec.buffers.items()}
    x, _, *rest = grouped.arguments(one)[1:]
    found = {each.name: gather(given[each.name], each.places[0]) for each in (x, *rest)}
    rows = found["x"].float()
    if spec.int8: rows = in_bytes(rows)
    more = {name: each if each.dtype == dtypes.int32 else each.cast(wide) for name, each in found.items()}
    made = grouped.multiply_groups(one, rows.cast(wide), matrices(spec, stack, exact).cast(wide),
                                   more["offsets"],
                              more.get("order"), more.get("weights"), more.get("bias"))
    return made if exact else round_to(made, one.dtype),


def matrices(spec: QuantGroupedSpec, stack: Mapping[str, Tensor], exact: bool = False) -> Tensor:
    """Returns the matrices of all groups [E, N, K], rounded as kernels may."""
    one = spec.grouped
    dtype = dtypes.float32 if exact or spec.int8 else one.dtype
    made = dequantize_stack(spec.type, spec.stack, stack, dtype)
    return made.contiguous().reshape(one.groups, one.n, one.k)
