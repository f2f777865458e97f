"""Matmuls of rows with a matrix for each group of them, as a function known by name.

Protocol. `grouped_matmul(x, w, offsets)` multiplies rows offsets[e] … offsets[e + 1] − 1 with matrix e
(tile/grouped_gemm/spec.py). Rows of a mixture of experts are slots (patterns/router/named.py), and need not
lie in their order: with `order` and `gather` g, row i is x[order[i] // g]; with `scatter`, result i is stored
as row order[i]. How many rows a group has is read on the device: no extent depends on it.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.grouped_gemm.gradient import Given, gradients
from tinygrad_nv.patterns.grouped_gemm.slots import apart, check_slots, require_kinds
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm import reference
from tinygrad_nv.tile.grouped_gemm.spec import FLOATS, GroupedGemmSpec, TransposedGroupedSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "grouped_gemm"


@dataclass(frozen=True)
class GroupedMatmul:
    """Tensors: x (M, K), w (E, N, K), offsets (E + 1), then those there are of order (R), weights (R) and
    bias (E, N). `gather` 0: rows lie in order. `transposed`: w is (E, K, N). `partial`: rows may be of no
    group."""
    rows: int
    gather: int = 0
    scatter: bool = False
    activation: str = ""
    weighted: bool = False
    biased: bool = False
    transposed: bool = False
    partial: bool = False

    @property
    def has_order(self) -> bool:
        """Whether there is an order."""
        return bool(self.gather or self.scatter or self.weighted)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, order: Tensor | None = None, *, gather: int = 0,
                   scatter: bool = False, activation: str = "", weights: Tensor | None = None,
                   bias: Tensor | None = None, transposed: bool = False, partial: bool = False) -> Tensor:
    """Rows of x (M, K) times the matrix of their group, of w (E, N, K), transposed: (R, N), with an
    activation (R, N / 2), in x's dtype. R is the length of `order`, int32, else M; offsets int32 (E + 1),
    weights float32 (R), bias (E, N). `transposed`: w is (E, K, N). `partial`: the last rows, from offsets[E],
    may be of no group; what is in their results is left open, and gradients do not read them. Raises
    `SpecError`."""
    what = GroupedMatmul(int(x.shape[0] if order is None else order.shape[0]), gather, scatter, activation,
                         weights is not None, bias is not None, transposed, partial)
    _check(what, x, w, offsets, order, weights, bias)
    more = [each for each in (order, weights, bias) if each is not None]
    return call(what, multiply, x, w, offsets, *more, grad=_gradient)[0]


def _check(what: GroupedMatmul, x: Tensor, w: Tensor, offsets: Tensor, order: Tensor | None,
           weights: Tensor | None, bias: Tensor | None) -> None:
    n, k = (2, 1) if what.transposed else (1, 2)
    if (x.ndim, w.ndim) != (2, 3) or w.shape[k] != x.shape[1] or w.dtype != x.dtype or x.dtype not in FLOATS:
        raise SpecError(f"x of {short(x.dtype)} {x.shape}, w of {short(w.dtype)} {w.shape}",
                        f"x (M, K) and w (E, {'K, N' if what.transposed else 'N, K'}), floats of one dtype")
    check_slots(what, int(w.shape[0]), int(w.shape[n]), offsets, order, weights, bias)
    _spec(what, x.uop, w.uop)


def multiply(what: GroupedMatmul, x: Tensor, w: Tensor, offsets: Tensor,
               *more: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows' products in plain tinygrad."""
    made = reference.multiply_groups(_spec(what, x.uop, w.uop), x, w, offsets, *apart(what, more))
    return (made.cast(x.dtype),)


def _spec(what: GroupedMatmul, x: UOp, w: UOp) -> GroupedGemmSpec:
    sources, k = map(int, x.shape)
    groups, n = int(w.shape[0]), int(w.shape[2 if what.transposed else 1])
    kind = TransposedGroupedSpec if what.transposed else GroupedGemmSpec
    return kind(groups, what.rows, n, k, x.dtype, sources, what.gather, what.scatter, what.activation,
                what.weighted, what.biased)


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    """Returns the gradients of x, w, weights and bias."""
    what, (x, w, offsets, *more) = call_.arg.aux, (Tensor(each).detach() for each in call_.src[1:])
    order, weights, bias = apart(what, tuple(more))
    found = gradients(Given(grouped_matmul, x, w, offsets, order, weights, bias, what.gather, what.scatter,
                            what.activation, what.transposed, what.partial), Tensor(grad))
    floats = [None] * what.has_order + [each for each in (found.weights, found.bias) if each is not None]
    return found.x.uop, found.w.uop, None, *(None if each is None else each.uop for each in floats)


def lower_grouped(what: GroupedMatmul, target: Target, x: UOp, w: UOp, offsets: UOp,
            *more: UOp) -> tuple[UOp, ...] | None:
    """Returns the results of a kernel; None on targets without one. Raises `Unsupported` or `SpecError` where
    there is none."""
    if TABLE.family(target.kind, GroupedGemmSpec) is None: return None
    if what.transposed and TABLE.choose(_spec(what, x, w), target) is None:     # float32 on GPUs
        what, w = replace(what, transposed=False), w.permute((0, 2, 1)).contiguous()
    spec, rest = _spec(what, x, w), [*more]
    require_kinds(what, rest, spec.dtype)
    moved = spec.active_bytes + (spec.x_rows * spec.k + spec.rows * spec.columns) * spec.dtype.itemsize
    out = program.Output((spec.rows, spec.columns), spec.dtype)
    return choose(spec, target).call(x.device, [out], [x, w, offsets, *rest], NAME, flops=spec.flops,
                                       nbytes=moved)


lower(GroupedMatmul, NAME, lower_grouped)
