"""Matmuls with 2:4 sparse matrices, as a function known by name.

Protocol. `sparse_matmul(x, w, bias, x_scale)` is x Wᵀ + bias with W 2:4 sparse (quant/sparse.py), both of
bfloat16 or float16, or codes of both, int8 or e4m3 (whose bits lie in uint8), with a scale of all of x or of
each of its rows:

    out = (Σ x w) · scale_w · scale_x + bias

in float32 (sums of int8 in int32), rounded once to `dtype`. The reference is that in plain tinygrad. Its
gradient is that of a floating-point x; sparse matrices have none.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.named_matmul import NamedMatmul
from tinygrad_nv.patterns.strides import place_rows, symbolic_rows
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.quant.sparse import DTYPES, SparseTensor, spread
from tinygrad_nv.quant.tensor import in_memory, numbers_of
from tinygrad_nv.tile.expression import Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import FLOAT16S, GemmSpec, Operand, Result
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "sparse_gemm"
RESULTS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class SparseMatmul:
    """x Wᵀ + bias: W of a dtype and shape [N, K], the result in `out`; tensors: x (…, K), W's values and
    metadata, then those there are of W's scales (N, 1), x's scales (…, 1), bias (N). `scale`: that of all
    of x, a constant."""
    dtype: DType
    shape: tuple[int, int]
    out: DType
    scaled: bool = False
    x_scaled: bool = False
    bias: bool = False
    scale: float | None = None


def has_kernel(dtype: DType, shape: tuple[int, int], target: Target) -> bool:
    """Whether a target multiplies sparse matrices of a dtype and shape."""
    (n, k), out = shape, dtypes.bfloat16
    if TABLE.family(target.kind, SparseGemmSpec) is None or dtype not in DTYPES or k % 4: return False
    total = Sum(dtypes.int32 if dtype == dtypes.int8 else dtypes.float32).cast(out)
    gemm = GemmSpec(16, n, k, Operand(dtype, k, 1), Operand(dtype, k, 1), Result(out, n, 1), (), total)
    return TABLE.choose(SparseGemmSpec(gemm), target) is not None


def sparse_matmul(x: Tensor, w: SparseTensor, bias: Tensor | None = None,
                  x_scale: Tensor | float | None = None, dtype: DType | None = None) -> Tensor:
    """x (…, K) times W [N, K], transposed, plus bias (N): (…, N) in `dtype`, by default that of a floating
    x, else bfloat16. Raises `SpecError`."""
    out = dtype or (x.dtype if x.dtype in FLOAT16S else dtypes.bfloat16)
    scales, constant = (x_scale, None) if isinstance(x_scale, Tensor) else (None, x_scale)
    _check(x, w, bias, scales, out)
    what = SparseMatmul(w.dtype, w.shape, out, w.scales is not None, scales is not None, bias is not None,
                        constant)
    more = [each for each in (w.scales, scales, bias) if each is not None]
    return call(what, multiply, x, w.values, w.metadata, *more, grad=_gradient)[0]


def _check(x: Tensor, w: SparseTensor, bias: Tensor | None, x_scale: Tensor | None, out: DType) -> None:
    (n, k), wanted = w.shape, in_memory(w.dtype)
    if x.dtype != wanted or not x.shape or x.shape[-1] != k:
        raise SpecError(f"x of {x.dtype.name} {x.shape}, w of {w.dtype.name} [{n}, {k}]",
                        f"x of {wanted.name} (…, {k})", "cast x, or quantise both in one way")
    if x_scale is not None and (x_scale.dtype != dtypes.float32 or
                                x_scale.shape not in ((1,) * x.ndim, (*x.shape[:-1], 1))):
        raise SpecError(f"scales of x, {x_scale.dtype.name} {x_scale.shape}, of x {x.shape}",
                        "float32 of all of x or of each row: (1, …), (…, 1)")
    if out not in RESULTS: raise SpecError(f"dtype of {out.name}", ", ".join(d.name for d in RESULTS))
    if bias is not None and bias.shape != (n,):
        raise SpecError(f"bias of shape {bias.shape}", f"({n},), as w has rows")


def multiply(what: SparseMatmul, x: Tensor, values: Tensor, metadata: Tensor,
               *more: Tensor) -> tuple[Tensor, ...]:
    """Returns the matmul in plain tinygrad."""
    rest, int8 = [*more], what.dtype == dtypes.int8
    wide = x.cast(dtypes.int32) if int8 else numbers_of(x, what.dtype)
    # contiguous: fused into the matmul the matrix would be made again for every row
    w = spread(what.dtype, what.shape, values, metadata).contiguous()
    made = wide.contiguous().matmul(w.T, dtype=w.dtype).float()
    if what.scaled: made = made * rest.pop(0).reshape(-1)
    if what.x_scaled: made = made * rest.pop(0)
    if what.scale is not None: made = made * what.scale
    if what.bias: made = made + rest.pop(0).float()
    return (made.cast(what.out),)


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    what, (x, values, metadata, *rest) = call_.arg.aux, [Tensor(each) for each in call_.src[1:]]
    made, given = Tensor(grad).float(), [*rest]
    sums = made.reshape(-1, what.shape[0]).sum(0)
    if what.scaled: made = made * given.pop(0).reshape(-1)
    if what.x_scaled: made = made * given.pop(0)
    if what.scale is not None: made = made * what.scale
    w = spread(what.dtype, what.shape, values, metadata).float().contiguous()
    floats = dtypes.is_float(x.dtype)
    ends = [None] * (len(rest) - what.bias) + [sums.cast(each.dtype).uop for each in rest[-1:] if what.bias]
    return (made @ w).cast(x.dtype).uop if floats else None, None, None, *ends


# **** kernels ****

def lower_sparse(what: SparseMatmul, target: Target, x: UOp, values: UOp, metadata: UOp,
            *more: UOp) -> tuple[UOp, ...] | None:
    """Returns the matmul by a kernel; None on targets without one. Raises `Unsupported` or `SpecError` where
    there is none."""
    if TABLE.family(target.kind, SparseGemmSpec) is None: return None
    return matmul_of(what, target, x, values, metadata, *more).call(target, what.out)


def matmul_of(what: SparseMatmul, target: Target, x: UOp, values: UOp, metadata: UOp,
              *more: UOp) -> NamedMatmul:
    """The matmul of arguments. Raises `Unsupported` or `SpecError` where kernels have none."""
    if symbolic_rows(x) is not None: raise Unsupported("rows known at launch, which would be columns")
    (n, k), (storage, a), m = what.shape, place_rows(x), prod(x.shape[:-1])
    ending, extras = _ending(what, x, [*more])
    gemm = GemmSpec(m, n, k, replace(a, dtype=what.dtype), Operand(what.dtype, k, 1), Result(what.out, n, 1),
                    (), ending)
    spec = SparseGemmSpec(gemm)
    return NamedMatmul(spec, (storage, values, metadata, *extras), (*x.shape[:-1], n), None, spec.nbytes)


def _ending(what: SparseMatmul, x: UOp, more: list[UOp]) -> tuple[Expression, list[UOp]]:
    """The epilogue, and what it reads."""
    made: Expression = Sum(dtypes.int32 if what.dtype == dtypes.int8 else dtypes.float32)
    made, extras = made.cast(dtypes.float32), list[UOp]()
    if what.scaled:
        extras.append(more.pop(0))
        made = made * Load(0, dtypes.float32, 0, 1)
    if what.x_scaled:
        scale = more.pop(0)
        storage, s = place_rows(scale)
        by_rows = scale.shape[:-1] == x.shape[:-1]
        made = made * Load(len(extras), dtypes.float32, s.mn if by_rows else 0, 0, (), s.offset)
        extras.append(storage)
    if what.scale is not None: made = made * what.scale
    if what.bias:
        made = made + Load(len(extras), more[0].dtype, 0, 1).cast(dtypes.float32)
        extras.append(more[0])
    return made.cast(what.out), extras


lower(SparseMatmul, NAME, lower_sparse, "NV_GEMM")
