"""Reductions and searches that tinygrad computes otherwise than ONNX says, or as one opset alone has them."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.table import op, tinygrads


@op("ReduceLogSumExp", since=18, host=(1,))
def lse(x: Tensor, axes: np.ndarray | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
                ) -> Tensor:
    """log Σ exp(x), by the largest element, so that nothing overflows."""
    if (axes is None or not axes.size) and noop_with_empty_axes: return x
    dims = tuple(range(x.ndim)) if axes is None or not axes.size else \
        tuple(int(each) for each in axes.reshape(-1))
    wide = dtypes.is_float(x.dtype) and x.dtype.itemsize >= 4
    f = x if wide else x.cast(dtypes.float32)
    if 0 in f.shape: return f.exp().sum(dims, keepdim=bool(keepdims)).log().cast(x.dtype)
    top = f.max(dims, keepdim=True)
    top = top.isinf().where(0.0, top)       # ∞ - ∞ is no number
    made = (f - top).exp().sum(dims, keepdim=True).log() + top
    if not keepdims:
        gone = {d % x.ndim for d in dims}
        made = made.reshape([n for i, n in enumerate(made.shape) if i not in gone])
    return made.cast(x.dtype)


@op("ReduceLogSumExp")
def lse_1(x: Tensor, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
    """Computes `lse` with its axes as an attribute."""
    return lse(x, None if axes is None else np.asarray(axes), keepdims)


def _of_integers(name: str) -> None:
    """tinygrad's reduction, its result in the type of x: it makes floats of integers."""
    theirs = tinygrads(name)

    @op(name, since=18, host=(1,))
    def reduce(x: Tensor, axes: np.ndarray | None = None, **attributes: int) -> Tensor:
        f = x if x.is_floating_point() else x.cast(dtypes.float64)
        made: Tensor = theirs(f, axes, **attributes).cast(x.dtype)
        return made

    @op(name)
    def reduce_1(x: Tensor, axes: Sequence[int] | None = None, **attributes: int) -> Tensor:
        return reduce(x, None if axes is None else np.asarray(axes), **attributes)


for each in ("ReduceMean", "ReduceLogSum"): _of_integers(each)


@op("ArgMax")
def arg_max(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Index of the largest element, the first or the last of equal ones."""
    if x.dtype == dtypes.bool: x = x.cast(dtypes.uint8)
    if not select_last_index: return x.argmax(axis, keepdim=bool(keepdims)).cast(dtypes.int64)
    last = x.flip(axis).argmax(axis, keepdim=bool(keepdims)).cast(dtypes.int64)
    return int(x.shape[axis]) - 1 - last


@op("ArgMin")
def arg_min(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Index of the least element."""
    # the complement, which no integer lacks
    return arg_max(-x if x.is_floating_point() else x.bitwise_not(), axis, keepdims, select_last_index)


@op("TopK", since=10, host=(1,))
def top_k(x: Tensor, k: np.ndarray, axis: int = -1, largest: int = 1, sorted: int = 1
          ) -> tuple[Tensor, Tensor]:
    """The largest or the least elements along a dimension, and where they are."""
    number, d = int(k.item()), axis % x.ndim
    if not number:
        none = x.shrink(tuple((0, 0) if i == d else None for i in range(x.ndim)))
        return none, none.cast(dtypes.int64)
    values, places = x.topk(number, d, bool(largest), bool(sorted))
    return values, places.cast(dtypes.int64)


@op("TopK")
def top_k_1(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Computes `top_k` with k as an attribute."""
    return top_k(x, np.asarray(k), axis)


@op("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """The elements at indices along a dimension, which may count from its end."""
    return x.gather(axis, (indices < 0).where(indices + int(x.shape[axis]), indices))
