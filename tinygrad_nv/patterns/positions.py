"""Positions: values that a graph computes from where an element stands, as whole multiples of its indices.

Protocol. tinygrad has no index of an element: `arange` is a sum over windows of a constant, about twenty
nodes of REDUCE, PAD and movement, and of symbolic length it does not simplify. values.py evaluates
such a node at points of its shape, with values for its variables, and gives the one affine form that agrees
with all of them; a small node is evaluated everywhere, of a large one the ends (where padding shows) and a
sample. None says that there is no such form.

`linear` reads an extent, which is arithmetic of variables.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops, UOp, sint


@dataclass(frozen=True)
class AffineForm:
    """`offset + Σ strides · indices + Σ factors · variables`, variables by name."""
    offset: int
    strides: tuple[int, ...]
    factors: tuple[tuple[str, int], ...] = ()


# **** extents ****

def is_variable(node: UOp) -> bool:
    """Whether a node is a variable of a launch."""
    return node.op in (Ops.PARAM, Ops.BUFFER) and node.arg.addrspace is AddrSpace.ALU


def linear(value: sint) -> AffineForm | None:
    """An extent, or another scalar, as whole multiples of variables; None of anything else."""
    if not isinstance(value, UOp): return AffineForm(value, ())
    if value.op is Ops.CONST: return AffineForm(int(value.val), ()) if value.val == int(value.val) else None
    if is_variable(value): return AffineForm(0, (), ((value.expr, 1),))
    if value.op in (Ops.CAST, Ops.RESHAPE, Ops.EXPAND): return linear(value.src[0])
    if value.op not in (Ops.ADD, Ops.SUB, Ops.MUL): return None
    x, y = map(linear, value.src)
    if x is None or y is None: return None
    if value.op is not Ops.MUL: return add_forms(x, y, -1 if value.op is Ops.SUB else 1)
    if x.factors and y.factors: return None
    many, by = (x, y.offset) if not y.factors else (y, x.offset)
    return add_forms(AffineForm(0, ()), many, by)


def add_forms(x: AffineForm, y: AffineForm, by: int = 1) -> AffineForm:
    """Returns x + by · y, of scalars."""
    factors = dict(x.factors)
    for name, factor in y.factors: factors[name] = factors.get(name, 0) + by * factor
    return AffineForm(x.offset + by * y.offset, (), tuple(sorted((n, f) for n, f in factors.items() if f)))
