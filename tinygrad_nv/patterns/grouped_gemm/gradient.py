"""The gradients of grouped matmuls, as grouped matmuls.

Protocol. Of y = act(x Wᵀ + b) · weight, with g the gradient of y, each row i of group e:

    u = x Wᵀ + b, computed again where there is an activation; dy = g · weight · act'(u)
    dx[i] = dy[i] W_e        a grouped matmul with W the other way round; rows of a token are added
    dW_e  = Σ dy[i]ᵀ x[i]    grouped_outer; db_e the same with 1 in x's place
    dweight[i] = Σ g[i] · act(u[i])

Nothing is as large as rows · N · K. Rows that no group has, have no gradient and give none. Kernels leave
them as they are in memory, so where there may be some (`partial`), they are not read.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinygrad_nv.patterns.embedding import EmbeddingGradient, add_gradients, embedding, mask_unknown_rows
from tinygrad_nv.patterns.grouped_gemm.outer import grouped_outer
from tinygrad_nv.patterns.named import call
from tinygrad_nv.patterns.router.rows import group_rows
from tinygrad_nv.tile.grouped_gemm.reference import activate


@dataclass(frozen=True)
class Given:
    """The arguments of a grouped matmul, and the function itself."""
    matmul: Callable[..., Tensor]
    x: Tensor
    w: Tensor
    offsets: Tensor
    order: Tensor | None
    weights: Tensor | None
    bias: Tensor | None
    gather: int
    scatter: bool
    activation: str
    transposed: bool
    partial: bool


@dataclass(frozen=True)
class Gradients:
    """Gradients of a grouped matmul's arguments; None for those there are not."""
    x: Tensor
    w: Tensor
    weights: Tensor | None
    bias: Tensor | None


def gradients(given: Given, grad: Tensor) -> Gradients:
    """The gradients, of that of the results."""
    dy, in_slots, weights = _rows(given, grad)
    order, ordered = given.order, given.order is not None
    gather = int(in_slots)
    rows_of = order if gather or given.gather else None
    if given.transposed: dw = grouped_outer(given.x, dy, given.offsets, rows_of, gather_y=given.gather,
                                            gather_x=gather)
    else: dw = grouped_outer(dy, given.x, given.offsets, rows_of, gather_y=gather, gather_x=given.gather)
    bias = None
    if given.bias is not None:
        ones = Tensor.ones(int(dy.shape[0]), 1, dtype=dy.dtype, device=dy.device).contiguous()
        bias = grouped_outer(dy, ones, given.offsets, order if gather else None, gather_y=gather,
                             gather_x=gather)[..., 0]
    rows, k = (int(extent) for extent in given.x.shape)
    whole = ordered and given.gather * rows == int(dy.shape[0])
    dx = _mask_unknown(given, given.matmul(dy, given.w, given.offsets, order if gather or whole else None,
                                    gather=gather, scatter=whole, transposed=not given.transposed), whole)
    if whole: dx = dx.reshape(rows, given.gather, k).sum(1)
    elif given.gather:
        assert order is not None
        dx = call(EmbeddingGradient(rows), add_gradients, order // given.gather, dx)[0]
    return Gradients(dx, dw, weights, bias)


def _rows(given: Given, grad: Tensor) -> tuple[Tensor, bool, Tensor | None]:
    """dy, whether it lies by slots or else in the order of groups, and the gradient of weights."""
    weights, order, dtype = given.weights, given.order, given.x.dtype
    if not given.activation:
        if weights is None: return grad, given.scatter, None
        assert order is not None
        wide, own = grad.float(), weights if given.scatter else weights[order]
        found = (wide * _mask_unknown(given, _matmul(given, given.scatter), given.scatter).float()).sum(-1)
        dy = (wide * own.unsqueeze(-1)).cast(dtype).contiguous()
        return dy, given.scatter, found if given.scatter else _by_slot(found, order)
    u = _mask_unknown(given, _matmul(given, False), False).float().contiguous().detach()
    da, found = grad.float(), None
    if given.scatter and order is not None: da = embedding(grad, order).float()
    a = activate(given.activation, u)
    if weights is not None and order is not None:
        found = _by_slot((da * a).sum(-1), order)
        da = da * weights[order].unsqueeze(-1)
    return a.gradient(u, gradient=da)[0].cast(dtype).contiguous(), False, found


def _matmul(given: Given, scatter: bool) -> Tensor:
    """x Wᵀ + b, by slots or in the order of groups."""
    return given.matmul(given.x, given.w, given.offsets, given.order if given.gather or scatter else None,
                        gather=given.gather, scatter=scatter, bias=given.bias, transposed=given.transposed)


def _mask_unknown(given: Given, x: Tensor, by_slots: bool) -> Tensor:
    """x, of slots or in the order of groups, with zeros in rows that no group has."""
    if not given.partial: return x
    known = Tensor.arange(int(x.shape[0]), dtype=dtypes.int32) < given.offsets[-1]
    if by_slots and given.order is not None:
        known = _by_slot(known.cast(dtypes.float32).contiguous(), given.order) > 0
    return mask_unknown_rows(x, known)


def _by_slot(x: Tensor, order: Tensor) -> Tensor:
    """Numbers in the order of groups (R), by slots: the places of slots are what sorts their order."""
    return embedding(x.unsqueeze(-1), group_rows(order, int(order.shape[0]))[0])[..., 0]
