"""A matmul and its epilogue in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor

from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, evaluate, gather, parameters


def arguments(spec: GemmSpec) -> tuple[Argument, ...]:
    """out, a, b (a place for each part), x0, x1, …"""
    out, extents = spec.out, (*spec.batch, spec.m, spec.n)

    def operand(name: str, one: Operand, rows: int, parts: int = 1) -> Argument:
        return Argument(name, one.dtype, tuple(
            Place(one.offset + p * spec.part, (*spec.batch, rows, spec.k), (*one.batch, one.mn, one.k))
            for p in range(parts)))
    return (Argument("out", out.dtype, (Place(out.offset, extents, (*out.batch, out.m, out.n)),), "out"),
            operand("a", spec.a, spec.m), operand("b", spec.b, spec.n, spec.parts),
            *parameters(extents, spec.epilogue))


def reference(spec: GemmSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[*batch, m, n]."""
    _, a, b, *_ = arguments(spec)
    wide = compute_dtype(spec.accumulate, exact)
    left = gather(given["a"], a.places[0]).cast(wide).contiguous()
    sums = [left @ gather(given["b"], place).cast(wide).contiguous().transpose(-1, -2)
            for place in b.places]
    return evaluate(spec.epilogue, (*spec.batch, spec.m, spec.n), sums, given, exact),
