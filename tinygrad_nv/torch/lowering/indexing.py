"""Elements by number: gathers and scatters. Their indices are checked (checks.py), but for those of operators
that torch itself calls unsafe."""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor, dtypes

from tinygrad_nv import elementary
from tinygrad_nv.torch.lowering.checks import check_index
from tinygrad_nv.torch.lowering.movement import axis
from tinygrad_nv.torch.lowering.table import Number, Out, Unsupported, lowers


@lowers("index.Tensor")
def _index_checking(out: Out, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    for i, each in enumerate(indices):
        if each is not None and each.dtype != dtypes.bool: check_index("index", each, x.shape[i],
                                                                       negative=True)
    return _index(out, x, indices)


@lowers("_unsafe_index.Tensor")
def _index(out: Out, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if any(each is not None and each.dtype == dtypes.bool for each in indices):
        raise Unsupported("an index of booleans, whose result has no shape before it is computed")
    return x[tuple(slice(None) if each is None else each for each in indices)]


@lowers("gather.default")
def _gather(out: Out, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    return x.gather(dim, check_index("gather", index, _extent(x, dim)))


@lowers("index_select.default")
def _index_select(out: Out, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x[(slice(None),) * axis(dim, x.ndim) + (check_index("index_select", index, _extent(x, dim)),)]


@lowers("index_copy.default")
def _index_copy(out: Out, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    dim = axis(dim, x.ndim)
    check_index("index_copy", index, x.shape[dim])
    places = index.reshape(tuple(-1 if i == dim else 1 for i in range(x.ndim))).expand(source.shape)
    return x.scatter(dim, places, source)


@lowers("index_put.default")
def _index_put_checking(out: Out, x: Tensor, indices: Sequence[Tensor | None], values: Tensor,
                       accumulate: bool = False) -> Tensor:
    if (index := indices[0]) is not None and index.dtype != dtypes.bool:
        check_index("index_put", index, x.shape[0], negative=True)
    return _index_put(out, x, indices, values, accumulate)


@lowers("_unsafe_index_put.default")
def _index_put(out: Out, x: Tensor, indices: Sequence[Tensor | None], values: Tensor,
               accumulate: bool = False) -> Tensor:
    index = indices[0]
    if len(indices) != 1 or index is None: raise Unsupported("index_put of several indices")
    if index.dtype == dtypes.bool: raise Unsupported("an index of booleans, whose result has no known shape")
    rows = values.cast(out.dtype).expand(*index.shape, *x.shape[1:]).reshape(-1, *x.shape[1:])
    index = (index < 0).where(index + x.shape[0], index)
    places = index.reshape(-1, *(1,) * (x.ndim - 1)).expand(rows.shape)
    return x.scatter_reduce(0, places, rows, "sum") if accumulate else x.scatter(0, places, rows)


@lowers("scatter.src")
def _scatter(out: Out, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return x.scatter(dim, check_index("scatter", index, _extent(x, dim)), src)


@lowers("scatter.value")
def _scatter_value(out: Out, x: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    return x.scatter(dim, check_index("scatter", index, _extent(x, dim)), value)


@lowers("scatter_add.default")
def _scatter_add(out: Out, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return x.scatter_reduce(dim, check_index("scatter_add", index, _extent(x, dim)), src, "sum")


@lowers("topk.default")
def _topk(out: Out, x: Tensor, k: int, dim: int = -1, largest: bool = True,
          sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, places = elementary.sort(x, dim, largest)
    if not x.ndim: return values, places
    kept = (slice(None),) * axis(dim, x.ndim) + (slice(k),)
    return values[kept], places[kept]


@lowers("sort.default")
def _sort(out: Out, x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return elementary.sort(x, dim, descending)


@lowers("sort.stable")
def _stable_sort(out: Out, x: Tensor, *, stable: bool | None = None, dim: int = -1,
                 descending: bool = False) -> tuple[Tensor, Tensor]:
    return elementary.sort(x, dim, descending)


def _extent(x: Tensor, dim: int) -> int: return x.shape[axis(dim, x.ndim)] if x.ndim else 1
