"""Sums of columns. A spec does not know its target.

Protocol: as norm/spec.py, with rows and columns in each other's place.

    out[n] = Σ over m of term[m, n]

`term` is a float32 expression of `Load`s of parameters and of positions. Of a norm's weight it is
grad[m, n] · x[m, n] / √(s[m] / n + eps), with s[m] = Σ x² in memory; of a bias it is grad[m, n]. Sums are of
float32, in an order that depends on the extents and the target alone.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import Apply, Expression, Sum, loads, parameters, short, show, walk
from tinygrad_nv.tile.gemm.spec import FLOAT16S


@dataclass(frozen=True)
class ColumnSumSpec:
    """`n` sums of `m` terms each, stored side by side as `dtype`. Of several `groups` of rows, of one size
    and the last of what is left, each has its own sums, [groups, n]. Raises `SpecError` for what cannot
    be."""
    m: int
    n: int
    term: Expression
    dtype: DType = dtypes.float32
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.m, self.n) < 1: raise SpecError(f"{self.m} rows of {self.n}", "extents ≥ 1")
        if self.term.dtype != dtypes.float32:
            raise SpecError(f"terms of {short(self.term.dtype)}", "float32", "end them with a cast")
        if self.dtype not in (dtypes.float32, *FLOAT16S):
            raise SpecError(f"sums of {short(self.dtype)}", "float32, bfloat16 or float16")
        if any(isinstance(node, Sum) for node in walk(self.term)):
            raise SpecError("a statistic in a term", "loads, positions and constants")
        if any(load.batch for load in loads(self.term)):
            raise SpecError("loads of a batch", "rows and columns")
        _ = self.parameters

    @property
    def parameters(self) -> tuple[DType, ...]:
        """The dtypes of what is loaded, by number."""
        return parameters(self.term)

    @property
    def flops(self) -> int:
        """Operations, one for each node of the term and each addition."""
        each = sum(isinstance(node, Apply) and node.op != "cast" for node in walk(self.term))
        return self.m * self.n * (each + 1)

    def __str__(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{self.m}x{self.n}{groups}: {short(self.dtype)} sums of columns of {show(self.term)}"
