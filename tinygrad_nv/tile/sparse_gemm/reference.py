"""A matmul with a 2:4 sparse matrix in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor

from tinygrad_nv.quant.sparse import spread
from tinygrad_nv.tile.gemm import reference as gemm
from tinygrad_nv.tile.reference import Argument, Given, dense
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec


def arguments(spec: SparseGemmSpec) -> tuple[Argument, ...]:
    """out, a, values, metadata, x0, x1, …"""
    out, a, _, *extras = gemm.arguments(spec.gemm)
    return out, a, *(Argument(name, one.dtype, (dense(*one.shape),)) for name, one in spec.buffers.items()), \
        *extras


def reference(spec: SparseGemmSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[m, n]."""
    values, metadata = (given[name].reshape(one.shape) for name, one in spec.buffers.items())
    whole = spread(spec.gemm.a.dtype, spec.shape, values, metadata).cast(spec.gemm.a.dtype)
    return gemm.reference(spec.gemm, {**given, "b": whole.contiguous().flatten()}, exact)
