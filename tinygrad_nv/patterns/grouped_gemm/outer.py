"""Sums of outer products of the rows of each group, as a function known by name: the gradients of matrices.

Protocol. `grouped_outer(y, x, offsets)` is what tile/grouped_gemm/outer.py says: for each group the sum of
yᵀ x over its rows, which need not lie in order.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm import reference
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "grouped_gemm"


@dataclass(frozen=True)
class GroupedOuter:
    """Tensors: y (M, N), x (L, K), offsets (E + 1), and an order (rows) where one is gathered."""
    rows: int
    gather_y: int = 0
    gather_x: int = 0


def grouped_outer(y: Tensor, x: Tensor, offsets: Tensor, order: Tensor | None = None, *, gather_y: int = 0,
                  gather_x: int = 0) -> Tensor:
    """For each group the sum over its rows of the outer products of a row of y (M, N) and one of x (L, K):
    (E, N, K). Row i is y[i] and x[i], or with `gather_y` g y[order[i] // g], and so x. offsets int32 (E + 1),
    order int32 (R). Raises `SpecError`."""
    if (y.ndim, x.ndim) != (2, 2) or x.dtype != y.dtype:
        raise SpecError(f"y of {short(y.dtype)} {y.shape}, x of {short(x.dtype)} {x.shape}",
                        "y (M, N) and x (L, K) of one dtype")
    if offsets.ndim != 1 or offsets.dtype != dtypes.int32:
        raise SpecError(f"offsets of {short(offsets.dtype)} {offsets.shape}", "int32 (E + 1,)")
    gathered = bool(gather_y or gather_x)
    if gathered != (order is not None) or (order is not None and order.dtype != dtypes.int32):
        raise SpecError("no order" if order is None else f"order of {short(order.dtype)} {order.shape}",
                        "int32 (R,) with gather_y or gather_x, and only then")
    what = GroupedOuter(int(y.shape[0] if order is None else order.shape[0]), gather_y, gather_x)
    _spec(what, y.uop, x.uop, offsets.uop)
    return call(what, _sum_outer, y, x, offsets, *[each for each in (order,) if each is not None])[0]


def _sum_outer(what: GroupedOuter, y: Tensor, x: Tensor, offsets: Tensor, *order: Tensor) -> tuple[Tensor,
                                                                                                   ...]:
    return (reference.sum_outer_products(_spec(what, y.uop, x.uop, offsets.uop), y, x, offsets,
                                         *order).cast(x.dtype),)


def _spec(what: GroupedOuter, y: UOp, x: UOp, offsets: UOp) -> GroupedOuterSpec:
    (y_rows, n), (x_rows, k) = map(int, y.shape), map(int, x.shape)
    return GroupedOuterSpec(int(offsets.shape[0]) - 1, what.rows, n, k, x.dtype, y_rows, x_rows,
                            what.gather_y, what.gather_x)


def lower_outer(what: GroupedOuter, target: Target, y: UOp, x: UOp, offsets: UOp,
            *order: UOp) -> tuple[UOp, ...] | None:
    """Returns the sums by a kernel; None on targets without one. Raises `Unsupported` or `SpecError` where
    there is none."""
    if TABLE.family(target.kind, GroupedOuterSpec) is None: return None
    spec = _spec(what, y, x, offsets)
    out = program.Output((spec.groups, spec.n, spec.k), spec.dtype)
    return choose(spec, target).call(x.device, [out], [y, x, offsets, *order], NAME, flops=spec.flops,
                                       nbytes=spec.nbytes)


lower(GroupedOuter, NAME, lower_outer)
