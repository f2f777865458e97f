"""Matmuls with a quantised matrix, as a function known by name.

Protocol. `quant_matmul(x, w, bias)` is x Wᵀ + bias with W dequantised to x's dtype: that is its reference,
and what runs where no kernel does. `prepare_matrix` matrices lie as kernels of their device read them. On a
CPU those are multiplied with activations in int8, where the caller permits it (NV_QUANT_ACTIVATIONS; the
spec's module says how). Of a matrix in fragments x is gathered for columns in another order than inputs (act
order). Its gradient is that of x, by a matrix that is dequantised again; quantised matrices have none. """
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad import Tensor
from tinygrad.dtype import dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.index import largest
from tinygrad_nv.patterns.named import behind, call, lower
from tinygrad_nv.patterns.named_matmul import NamedMatmul
from tinygrad_nv.patterns.strides import place_rows, symbolic_rows
from tinygrad_nv.patterns.target import Target, target_of
from tinygrad_nv.quant.tensor import QTensor, dequantize
from tinygrad_nv.quant.types import QType, buffers, nbytes
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "quant_gemm"


@dataclass(frozen=True)
class QuantMatmul:
    """x Wᵀ + bias: x (…, K), W of a type and shape [N, K]; tensors: x, W's buffers, bias if there is one.
    `int8`: kernels may round x to int8, with a scale for each 32 inputs."""
    type: QType
    shape: tuple[int, int]
    bias: bool = False
    int8: bool = False


def quant_matmul(x: Tensor, w: QTensor, bias: Tensor | None = None, int8: bool = False) -> Tensor:
    """x (…, K) times W [N, K], transposed, plus bias (N): (…, N) in x's dtype. With `int8` kernels of the CPU
    round x to int8, with a scale for each 32 inputs, as llama.cpp does. Raises `SpecError`."""
    if not x.shape or x.shape[-1] != w.shape[1]:
        raise SpecError(f"x of shape {x.shape}, w of {list(w.shape)}", f"x of shape (…, {w.shape[1]})")
    if w.type.permuted and w.type.layout == "fragments": x, w = x[..., w.buffers["order"]], w.in_order()
    what, more = QuantMatmul(w.type, w.shape, bias is not None, int8), [] if bias is None else [bias]
    return call(what, multiply, x, *w.buffers.values(), *more, grad=_gradient)[0]


def multiply(what: QuantMatmul, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """Returns the matmul in plain tinygrad."""
    return (x.linear(_matrix(what, x, *rest).T, rest[-1] if what.bias else None),)


def _matrix(what: QuantMatmul, x: Tensor, *rest: Tensor) -> Tensor:
    given = dict(zip(buffers(what.type, *what.shape), rest, strict=False))
    # contiguous: fused into the matmul it would be dequantised again for every row
    return dequantize(what.type, what.shape, given, x.dtype).contiguous()


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    what, (x, codes, *rest) = call_.arg.aux, [Tensor(each) for each in call_.src[1:]]
    # behind: the matrices of all layers would be dequantised before the first gradient is there
    rest = [Tensor(behind(codes.uop, grad)), *rest]
    made = Tensor(grad) @ _matrix(what, x, *rest)
    sums = Tensor(grad).reshape(-1, what.shape[0]).sum(0).uop if what.bias else None
    return made.uop, *[None] * (len(rest) - what.bias), *[sums] * what.bias


# **** kernels ****

def lower_quant(what: QuantMatmul, target: Target, x: UOp, *rest: UOp) -> tuple[UOp, ...] | None:
    """Returns the matmul by a kernel; None on targets without one. Raises `Unsupported` or `SpecError` where
    there is none."""
    if TABLE.family(target.kind, QuantGemmSpec) is None: return None
    return matmul_of(what, target, x, *rest).call(target, x.dtype)


def matmul_of(what: QuantMatmul, target: Target, x: UOp, *rest: UOp) -> NamedMatmul:
    """The matmul of arguments. Raises `Unsupported` or `SpecError` where kernels have none."""
    (n, k), dtype, rows = what.shape, x.dtype, symbolic_rows(x)
    m, epilogue = prod(largest(extent) for extent in x.shape[:-1]), Sum().cast(dtype)
    if what.bias:
        if rest[-1].dtype != dtype: raise Unsupported(f"a bias of {rest[-1].dtype.name} to {dtype.name}")
        epilogue = epilogue + Load(0, dtype, 0, 1)
    storage, a = place_rows(x)
    gemm = GemmSpec(m, n, k, a, Operand(dtype, k, 1), Result(dtype, n, 1), (), epilogue,
                    symbolic=rows is not None)
    spec = QuantGemmSpec(gemm, what.type, in_bytes(what.type, what.int8))
    return NamedMatmul(spec, (storage, *rest), (*x.shape[:-1], n), rows, nbytes(what.type, n, k))


def prepare_matrix(w: QTensor, codes: bool = False) -> QTensor:
    """Returns a matrix as kernels of its device read it fastest: in tiles or fragments where templates take
    those, else as it is. It has buffers of its own, about as many bytes: drop the other. `codes`: for
    `scaled_matmul`, which reads no fragments."""
    target = target_of(w.buffers["codes"].device)
    if target is None or w.type.layout != "rows": return w
    if codes and target.matrix_layout == "fragments": return w
    made = w.with_multipliers() if target.matrix_layout == "fragments" else w
    (n, k), dtype = w.shape, dtypes.bfloat16
    try:
        type = replace(made.type.of_rows(), layout=target.matrix_layout, permuted=False)
        gemm = GemmSpec(1, n, k, Operand(dtype, k, 1), Operand(dtype, k, 1), Result(dtype, n, 1))
        found = TABLE.choose(QuantGemmSpec(gemm, type), target)
    except SpecError: return w
    return w if found is None or not w.finite else made.of_rows().with_layout(type.layout)


def preparation_key(device: str | None) -> str:
    """Returns what `prepare_matrix` depends on besides a matrix, for keys of what it made: the kind of
    kernels, and their instructions. Not the number of threads, which changes no layout."""
    target = target_of(device)
    if target is None: return "none"
    return f"{target.kind} {target.instructions}"


def in_bytes(type: QType, int8: bool) -> bool:
    """Whether activations are quantised to int8, which codes of floats are not multiplied with."""
    asked, whole = config.get("NV_QUANT_ACTIVATIONS"), type.element.lsb > 0
    return type.layout == "tiles" and whole and (asked == "int8" or (asked == "auto" and int8))


lower(QuantMatmul, NAME, lower_quant)
