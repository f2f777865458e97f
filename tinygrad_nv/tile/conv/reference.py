"""A convolution and its epilogue in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.reference import Argument, Given, compute_dtype, dense, evaluate, parameters


def arguments(spec: ConvSpec) -> tuple[Argument, ...]:
    """out, x, w, x0, x1, …"""
    gemm = spec.gemm
    return (Argument("out", spec.dtype, (dense(gemm.m, gemm.n),), "out"),
            Argument("x", spec.dtype, (dense(spec.batch, spec.height, spec.width, spec.channels),)),
            Argument("w", spec.dtype, (dense(spec.outputs, *spec.kernel, spec.channels),)),
            *parameters((gemm.m, gemm.n), spec.epilogue))


def reference(spec: ConvSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[B OH OW, O]."""
    wide, gemm = compute_dtype(dtypes.float32, exact), spec.gemm
    x = given["x"].reshape(spec.batch, spec.height, spec.width, spec.channels).cast(wide)
    w = given["w"].reshape(spec.outputs, *spec.kernel, spec.channels).cast(wide)
    left = patches(x, spec).reshape(gemm.m, gemm.k).contiguous()
    sums = left @ w.reshape(gemm.n, gemm.k).T
    return evaluate(spec.epilogue, (gemm.m, gemm.n), [sums], given, exact),


def patches(x: Tensor, spec: ConvSpec) -> Tensor:
    """The left operand of the matmul, (B, OH, OW, KH, KW, C), of images (B, H, W, C)."""
    above, below, left, right = spec.padding
    padded = x.permute(0, 3, 1, 2).pad((left, right, above, below))
    return padded._pool(spec.kernel, spec.stride).permute(0, 2, 3, 4, 5, 1)
