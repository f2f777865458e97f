"""A matmul of rows (…, K) with a matrix [N, K] that a named function computes: its spec, what its kernels
read, and its call; with more after it in its epilogue, if that is asked for."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import DType
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp, sint

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.expression import Expression, Sum, loads, substitute
from tinygrad_nv.tile.gemm.spec import GemmSpec, Result
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec

Spec = GemmSpec | QuantGemmSpec | SparseGemmSpec


@dataclass(frozen=True)
class NamedMatmul:
    """A spec whose result is dense; `inputs` in the order of its kernels, the epilogue's parameters last; the
    result's shape (…, N), `rows` a symbolic number of them, and the bytes of the matrix."""
    spec: Spec
    inputs: tuple[UOp, ...]
    shape: tuple[sint, ...]
    rows: UOp | None
    matrix_bytes: int

    @property
    def gemm(self) -> GemmSpec:
        """The matmul with a matrix that is neither quantised nor sparse."""
        return self.spec if isinstance(self.spec, GemmSpec) else self.spec.gemm

    def with_epilogue(self, after: Expression, parts: int, extras: Sequence[UOp]) -> NamedMatmul:
        """The matmul with `after` in its epilogue: an expression of `parts` equal parts of its result's
        columns, `Sum(part=i)` of the result's dtype, and of `extras`, whose loads are numbered from 0. Raises
        `SpecError`."""
        gemm = self.gemm
        n, known = gemm.n // parts, dict[Expression, Expression]()
        for i in range(parts): known[Sum(gemm.out.dtype, i)] = _part(gemm, i, n)
        for load in loads(after): known[load] = replace(load, parameter=load.parameter + len(gemm.parameters))
        epilogue = substitute(after, known)
        made = replace(gemm, n=n, out=Result(epilogue.dtype, n, 1), epilogue=epilogue, parts=parts,
                       part=n * gemm.k if parts > 1 else 0)
        spec = made if isinstance(self.spec, GemmSpec) else replace(self.spec, gemm=made)
        return replace(self, spec=spec, inputs=(*self.inputs, *extras), shape=(*self.shape[:-1], n))

    def call(self, target: Target, dtype: DType, words: str = "") -> tuple[UOp, ...]:
        """The result of a kernel, which the graph has as `dtype`. Raises `Unsupported` where there is
        none."""
        gemm, m = self.gemm, prod(self.shape[:-1])
        counted: dict[str, Any] = {} if self.rows is None else {"rows": self.rows, "variables": [self.rows]}
        moved = self.matrix_bytes + m * (gemm.k * gemm.a.dtype.itemsize + gemm.n * dtype.itemsize)
        return choose(self.spec, target, inputs=len(self.inputs)).call(
            self.inputs[0].device, [program.Output(self.shape, dtype)], self.inputs, words=words,
            flops=self.spec.flops // gemm.m * m, nbytes=moved, **counted)


def _part(gemm: GemmSpec, number: int, n: int) -> Expression:
    """The epilogue of a part of the columns."""
    known: dict[Expression, Expression] = {Sum(gemm.accumulate): Sum(gemm.accumulate, number)}
    for load in loads(gemm.epilogue): known[load] = replace(load, offset=load.offset + number * n * load.n)
    return substitute(gemm.epilogue, known)
