"""Sums of columns in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor

from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.reference import Argument, Given, dense, evaluate, parameters, round_to


def arguments(spec: ColumnSumSpec) -> tuple[Argument, ...]:
    """out [n], or of groups [groups, n], x0, x1, …"""
    out = (spec.n,) if spec.groups == 1 else (spec.groups, spec.n)
    return Argument("out", spec.dtype, (dense(*out),), "out"), *parameters((spec.m, spec.n), spec.term)


def reference(spec: ColumnSumSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """The sums, [n]."""
    made = evaluate(spec.term, (spec.m, spec.n), (), given, exact).sum(0)
    return (made if exact else round_to(made, spec.dtype),)
