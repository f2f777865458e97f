"""Matmuls of operands in 8 bits with scales, as a function known by name.

Protocol. `scaled_matmul(x, x_scale, w, bias)` has codes of x and of W: both int8, or both e4m3, whose bits
lie in uint8. Sums of int8 are exact, in int32; those of e4m3 are of float32 (tensor cores keep 14 bits:
kernels add their sums to others in float32 after each 128 of K). Scales are of

    x   all of it (1, …), each row (…, 1), or each 128 columns of a row (…, K / 128), in float32
    W   all of it, or each output; blocks of 128 columns, where x has such

Where they are of whole rows and columns they are the epilogue of a plain matmul (tile/gemm):

    out = (Σ x w) · scale_w · scale_x + bias

in float32, rounded once to `dtype`; of a matrix in tiles, as CPUs read it, of one that is quantised
(tile/quant_gemm). Sums of groups are multiplied by both scales while they are added up
(tile/scaled_gemm). The reference is that in plain tinygrad. There is no gradient: codes have none.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.index import largest
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.named_matmul import NamedMatmul
from tinygrad_nv.patterns.strides import place_rows, symbolic_rows
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.quant.layouts import unlaid
from tinygrad_nv.quant.tensor import QTensor, dequantize, in_memory, numbers_of
from tinygrad_nv.quant.types import E4M3, INT8, QType, Scale, nbytes
from tinygrad_nv.tile.expression import Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import FLOAT16S, GemmSpec, Operand, Result
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "scaled_gemm"
FLOATS = (dtypes.float32, *FLOAT16S)
Spec = GemmSpec | ScaledGemmSpec | QuantGemmSpec


@dataclass(frozen=True)
class ScaledMatmul:
    """x Wᵀ + bias of codes and scales, in `dtype`: W of a type and shape [N, K]; tensors: codes of x (…, K),
    its scales (…, groups), W's codes and scales, bias if there is one. `scale`: that of all of x, a constant;
    there is no tensor of scales then."""
    type: QType
    shape: tuple[int, int]
    dtype: DType
    bias: bool = False
    scale: float | None = None


def takes_codes(type: QType) -> bool:
    """Whether a matrix's codes can be multiplied as they are: int8 or e4m3, with scales alone."""
    plain = QType(type.element, type.scale, layout="tiles" if _in_tiles(type) else "rows")
    return type == plain and type.element in (INT8, E4M3) and not type.scale.e8m0


def _in_tiles(type: QType) -> bool: return type.layout == "tiles" and type.element == INT8


def has_kernel(type: QType, shape: tuple[int, int], element: str, block: Scale, target: Target) -> bool:
    """Whether a target multiplies codes of a matrix with those of activations, quantised to `element` with
    scales of blocks. On targets whose matrices lie in tiles: of one that is `prepared`."""
    (n, k), m = shape, 64       # more rows than gemv's
    if target.matrix_layout == "tiles": type = replace(type.of_rows(), layout="tiles")
    group = block.columns if block.columns < k else 0
    if not takes_codes(type) or type.element.name != element or group != type.scale.columns: return False
    try:
        spec: Spec
        spec = gemm = _gemm(ScaledMatmul(type, shape, dtypes.bfloat16), m, Operand(type.element.dtype, k, 1),
                            False)
        if _in_tiles(type): spec = QuantGemmSpec(gemm, type)
        if group == GROUP:
            scales = BlockScales(1, k // GROUP), BlockScales(type.scale.rows or n, -(-k // GROUP))
            spec = ScaledGemmSpec(m, n, k, gemm.a, gemm.b, gemm.out, a_scale=scales[0], b_scale=scales[1])
        return group in (0, GROUP) and TABLE.choose(spec, target) is not None
    except SpecError: return False


def scaled_matmul(x: Tensor, x_scale: Tensor | float, w: QTensor, bias: Tensor | None = None,
                  dtype: DType = dtypes.bfloat16) -> Tensor:
    """Codes x (…, K) with their scales times W [N, K], transposed, plus bias (N): (…, N) in `dtype`. Raises
    `SpecError`."""
    _check(x, x_scale, w, bias, dtype)
    constant = None if isinstance(x_scale, Tensor) else x_scale
    what = ScaledMatmul(w.type, w.shape, dtype, bias is not None, constant)
    scales, more = [x_scale] if isinstance(x_scale, Tensor) else [], [] if bias is None else [bias]
    return call(what, multiply, x, w.buffers["codes"], w.buffers["scales"], *scales, *more)[0]


def _check(x: Tensor, x_scale: Tensor | float, w: QTensor, bias: Tensor | None, dtype: DType) -> None:
    (n, k), type = w.shape, w.type
    if not takes_codes(type): raise SpecError(f"w of {type}", "int8 or e4m3, with scales and nothing else")
    wanted = in_memory(type.element.dtype)
    if x.dtype != wanted or not x.shape or x.shape[-1] != k:
        raise SpecError(f"x of {x.dtype.name} {x.shape}, w of {type} [{n}, {k}]",
                        f"x of {wanted.name} (…, {k})", "quantise both in one way")
    if isinstance(x_scale, Tensor): _check_scales(x, x_scale, type)
    if dtype not in FLOATS: raise SpecError(f"dtype of {dtype.name}", ", ".join(d.name for d in FLOATS))
    if bias is not None and bias.shape != (n,):
        raise SpecError(f"bias of shape {bias.shape}", f"({n},), as w has rows")


def _check_scales(x: Tensor, x_scale: Tensor, type: QType) -> None:
    k, groups = x.shape[-1], x_scale.shape[-1] if x_scale.ndim == x.ndim else 0
    fits = x_scale.shape in ((1,) * x.ndim, (*x.shape[:-1], groups)) and groups
    if x_scale.dtype != dtypes.float32 or not fits:
        raise SpecError(f"scales of x, {x_scale.dtype.name} {x_scale.shape}, of x {x.shape}",
                        "float32 of all of x, of each row or of its groups: (1, …), (…, 1) or (…, groups)")
    if k % groups or (groups > 1 and k // groups != type.scale.columns):
        raise SpecError(f"{groups} scales for {k} columns of x, w of {type}", "groups as long as those of w")


def multiply(what: ScaledMatmul, x: Tensor, codes: Tensor, scales: Tensor,
               *more: Tensor) -> tuple[Tensor, ...]:
    """Returns the matmul in plain tinygrad. Of groups, scales are multiplied before the sum."""
    if what.scale is None: x_scale, bias = more[0], more[1:]
    else: x_scale, bias = Tensor.full((1,) * x.ndim, what.scale, dtype=dtypes.float32, device=x.device), more
    groups, int8, plain = int(x_scale.shape[-1]), what.type.element == INT8, replace(what.type, layout="rows")
    if _in_tiles(what.type):
        codes, scales = (unlaid(what.type, name, one, *what.shape)
                         for name, one in (("codes", codes), ("scales", scales)))
    if groups > 1 or what.type.scale.columns:
        wide = _numbers(what.type, x).float().reshape(*x.shape[:-1], groups, -1) * x_scale.unsqueeze(-1)
        w = dequantize(plain, what.shape, {"codes": codes, "scales": scales})
        made = wide.reshape(x.shape).contiguous() @ w.contiguous().T
    else:
        left, right = (_numbers(what.type, each).contiguous() for each in (x, codes))
        sums = left.matmul(right.T, dtype=dtypes.int32 if int8 else dtypes.float32)
        made = sums.float() * scales.float().reshape(-1) * x_scale
    for each in bias: made = made + each.float()
    return (made.cast(what.dtype),)


def _numbers(type: QType, codes: Tensor) -> Tensor:
    """Returns the numbers that codes stand for, of int8 in int32, else in float32."""
    return codes.cast(dtypes.int32) if type.element == INT8 else numbers_of(codes, type.element.dtype)


# **** kernels ****

def lower_scaled(what: ScaledMatmul, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """Returns the matmul by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    return matmul_of(what, target, *arguments).call(target, what.dtype)


def matmul_of(what: ScaledMatmul, target: Target, x: UOp, codes: UOp, scales: UOp, *more: UOp) -> NamedMatmul:
    """The matmul of arguments. Raises `Unsupported` or `SpecError` where kernels have none."""
    (n, k), rows, (storage, a) = what.shape, symbolic_rows(x), place_rows(x)
    x_scale, bias = (None, more) if what.scale is not None else (more[0], more[1:])
    m = prod(largest(extent) for extent in x.shape[:-1])
    groups = what.type.scale.columns or (x_scale is not None and x_scale.shape[-1] > 1)
    way = _of_groups if groups else _of_rows
    spec, inputs = way(what, _gemm(what, m, a, rows is not None), x, x_scale, scales, bias)
    if _in_tiles(what.type) and isinstance(spec, GemmSpec): spec = QuantGemmSpec(spec, what.type)
    return NamedMatmul(spec, (storage, codes, *inputs, *bias), (*x.shape[:-1], n), rows,
                       nbytes(what.type, n, k))


def _gemm(what: ScaledMatmul, m: int, a: Operand, symbolic: bool) -> GemmSpec:
    """The matmul of codes."""
    (n, k), dtype = what.shape, what.type.element.dtype
    total = Sum(dtypes.int32 if what.type.element == INT8 else dtypes.float32)
    return GemmSpec(m, n, k, replace(a, dtype=dtype), Operand(dtype, k, 1), Result(what.dtype, n, 1),
                    epilogue=total.cast(what.dtype), symbolic=symbolic)


def _of_rows(what: ScaledMatmul, gemm: GemmSpec, x: UOp, x_scale: UOp | None, scales: UOp,
             bias: Sequence[UOp]) -> tuple[Spec, list[UOp]]:
    """With scales of rows and columns in its epilogue; and where the scales lie."""
    total = Sum(gemm.accumulate).cast(dtypes.float32)
    total = total * Load(0, scales.dtype, 0, what.type.scale.rows).cast(dtypes.float32)
    if x_scale is None:
        assert what.scale is not None
        return replace(gemm, epilogue=_end_epilogue(what, total * what.scale, 1, bias)), [scales]
    storage, s = place_rows(x_scale)
    total = total * Load(1, dtypes.float32, s.mn if _by_rows(x, x_scale) else 0, 0, (), s.offset)
    return replace(gemm, epilogue=_end_epilogue(what, total, 2, bias)), [scales, storage]


def _of_groups(what: ScaledMatmul, gemm: GemmSpec, x: UOp, x_scale: UOp | None, scales: UOp,
               bias: Sequence[UOp]) -> tuple[Spec, list[UOp]]:
    """With scales of groups of K."""
    blocks = what.type.scale
    if x_scale is None or blocks.columns != GROUP:
        raise Unsupported(f"scales of {what.type}, and {'one' if x_scale is None else 'groups'} of x: "
                          f"groups of {GROUP} of both")
    storage, s = place_rows(x_scale)
    ours = BlockScales(1, s.mn if _by_rows(x, x_scale) else 0, int(x_scale.shape[-1] > 1), offset=s.offset)
    theirs = BlockScales(blocks.rows or gemm.n, -(-gemm.k // GROUP))
    if scales.dtype != dtypes.float32: scales = scales.cast(dtypes.float32)
    ended = _end_epilogue(what, Sum(gemm.accumulate), 0, bias)
    return ScaledGemmSpec(gemm.m, gemm.n, gemm.k, gemm.a, gemm.b, gemm.out, epilogue=ended,
                          symbolic=gemm.symbolic, a_scale=ours, b_scale=theirs), [storage, scales]


def _by_rows(x: UOp, x_scale: UOp) -> bool: return x_scale.shape[:-1] == x.shape[:-1]


def _end_epilogue(what: ScaledMatmul, total: Expression, parameter: int, bias: Sequence[UOp]) -> Expression:
    """A sum that has been scaled, plus bias, rounded."""
    for i, each in enumerate(bias):
        total = total + Load(parameter + i, each.dtype, 0, 1).cast(dtypes.float32)
    return total.cast(what.dtype)


lower(ScaledMatmul, NAME, lower_scaled, "NV_GEMM")
