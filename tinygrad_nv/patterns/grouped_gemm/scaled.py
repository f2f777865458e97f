"""Matmuls of rows of 8-bit floats with the matrix of their group, both with scales, as a function known by
name: what mixtures of experts in FP8 are (arXiv 2412.19437, section 3.3.2).

Protocol. `scaled_grouped_matmul(x, x_scale, stack, offsets)` is `grouped_matmul` (named.py) of codes of e4m3,
whose bits lie in uint8, and of scales: of each 128 columns of a row of x, and of blocks of 128 x 128 of a
matrix (tile/grouped_gemm/spec.py). With an activation a stack has two matrices for each group, gate and up.
The reference multiplies codes with their scales first. There is no gradient: codes have none.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.grouped_gemm.slots import apart, check_slots, require_kinds
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.quant.stack import QStack, dequantize_stack
from tinygrad_nv.quant.tensor import in_memory, numbers_of
from tinygrad_nv.quant.types import E4M3, QType, Scale
from tinygrad_nv.tile.grouped_gemm import reference
from tinygrad_nv.tile.grouped_gemm.spec import FLOATS, GROUP, ScaledGroupedGemmSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "grouped_gemm"
BLOCKS = E4M3 @ Scale(GROUP, GROUP)     # the type of matrices
ROWS = Scale(1, GROUP)                  # scales of x


@dataclass(frozen=True)
class ScaledGroupedMatmul:
    """Tensors: codes of x (M, K), its scales (M, K / 128), codes and scales of a stack, offsets (E + 1), then
    those there are of order (R), weights (R) and bias (E, N)."""
    stack: tuple[int, int, int]
    rows: int
    dtype: DType
    gather: int = 0
    scatter: bool = False
    activation: str = ""
    weighted: bool = False
    biased: bool = False

    @property
    def has_order(self) -> bool:
        """Whether there is an order."""
        return bool(self.gather or self.scatter or self.weighted)

    def spec(self, sources: int) -> ScaledGroupedGemmSpec:
        """The matmul of so many rows of x. Raises `SpecError`."""
        (count, n, k), halves = self.stack, 2 if self.activation else 1
        if count % halves: raise SpecError(f"{count} matrices with an activation", "two for each group")
        if halves > 1 and n % GROUP:
            raise SpecError(f"gate and up of {n} rows", f"a multiple of {GROUP}: of blocks with a scale")
        return ScaledGroupedGemmSpec(count // halves, self.rows, n * halves, k, sources=sources,
                                     gather=self.gather, scatter=self.scatter, activation=self.activation,
                                     weighted=self.weighted, biased=self.biased, result=self.dtype)


def scaled_grouped_matmul(x: Tensor, x_scale: Tensor, stack: QStack, offsets: Tensor,
                          order: Tensor | None = None, *, gather: int = 0, scatter: bool = False,
                          activation: str = "", weights: Tensor | None = None, bias: Tensor | None = None,
                          dtype: DType = dtypes.bfloat16) -> Tensor:
    """Rows of codes x (M, K) with scales (M, K / 128) times the matrix of their group, of a stack of E
    matrices [N, K] of e4m3 with scales of 128 x 128, transposed: (R, N); with an activation of 2 E, gate and
    up of each group: (R, N). In `dtype`. R is the length of `order`, int32, else M; offsets int32 (E + 1),
    weights float32 (R), bias (E, N), or (E, 2 N) with an activation. Raises `SpecError`."""
    rows = int(x.shape[0] if order is None else order.shape[0])
    what = ScaledGroupedMatmul(stack.shape, rows, dtype, gather, scatter, activation, weights is not None,
                               bias is not None)
    _check(what, x, x_scale, stack.type)
    one = what.spec(int(x.shape[0]))
    check_slots(what, one.groups, one.n, offsets, order, weights, bias)
    more = [each for each in (order, weights, bias) if each is not None]
    return call(what, multiply, x, x_scale, stack.buffers["codes"], stack.buffers["scales"], offsets,
                *more)[0]


def _check(what: ScaledGroupedMatmul, x: Tensor, x_scale: Tensor, type: QType) -> None:
    if type != BLOCKS: raise SpecError(f"a stack of {type}", str(BLOCKS), "use quant_grouped_matmul")
    k, wanted = what.stack[2], in_memory(E4M3.dtype)
    if x.ndim != 2 or x.shape[1] != k or x.dtype != wanted:
        raise SpecError(f"x of {x.dtype.name} {x.shape}", f"{wanted.name} (M, {k}): codes of e4m3")
    groups = -(-k // GROUP)
    if x_scale.shape != (x.shape[0], groups) or x_scale.dtype != dtypes.float32:
        raise SpecError(f"scales of x, {x_scale.dtype.name} {x_scale.shape}",
                        f"float32 ({x.shape[0]}, {groups}): of each {GROUP} columns of a row")
    if what.dtype not in FLOATS:
        raise SpecError(f"dtype of {what.dtype.name}", ", ".join(each.name for each in FLOATS))


def multiply(what: ScaledGroupedMatmul, x: Tensor, x_scale: Tensor, codes: Tensor, scales: Tensor,
               offsets: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows' products in plain tinygrad."""
    spec = what.spec(int(x.shape[0]))
    wide = x_scale.repeat_interleave(GROUP, 1)[:, :spec.k]
    rows = (numbers_of(x, E4M3.dtype) * wide).contiguous()
    w = dequantize_stack(BLOCKS, what.stack, {"codes": codes, "scales": scales})
    w = w.reshape(spec.groups, spec.n, spec.k).contiguous()
    return (reference.multiply_groups(spec, rows, w, offsets, *apart(what, more)).cast(what.dtype),)


# **** kernels ****

def has_kernel(shape: tuple[int, int, int], activation: str, dtype: DType, target: Target) -> bool:
    """Whether a target multiplies codes, of whole groups as `quantize` makes them, with those of a stack of
    BLOCKS; with results of a dtype."""
    rows = 64   # of which templates depend no more
    if shape[2] % GROUP: return False
    try: spec = ScaledGroupedMatmul(shape, rows, dtype, activation=activation).spec(rows)
    except SpecError: return False
    return TABLE.choose(spec, target) is not None


def lower_scaled(what: ScaledGroupedMatmul, target: Target, x: UOp, x_scale: UOp, codes: UOp, scales: UOp,
            offsets: UOp, *more: UOp) -> tuple[UOp, ...]:
    """Returns the results of a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    spec = what.spec(int(x.shape[0]))
    require_kinds(what, more, spec.out)
    moved = spec.active_bytes + spec.x_rows * spec.k + spec.rows * spec.columns * spec.out.itemsize
    out = program.Output((spec.rows, spec.columns), spec.out)
    return choose(spec, target).call(x.device, [out], [x, codes, x_scale, scales, offsets, *more], NAME,
                                       flops=spec.flops, nbytes=moved)


lower(ScaledGroupedMatmul, NAME, lower_scaled)
