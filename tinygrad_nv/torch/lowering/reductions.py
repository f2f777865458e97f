"""Reductions: sums of what torch sums, in its dtypes."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv import elementary
from tinygrad_nv.torch.lowering.table import Number, Out, Unsupported, lowers

Dims = int | Sequence[int] | None


def dims_of(dim: Dims) -> Any:
    """tinygrad's axes: torch means all of them by none."""
    if dim is None or (not isinstance(dim, int) and not dim): return None
    return dim if isinstance(dim, int) else tuple(dim)


@lowers("sum.default", "sum.dim_IntList")
def _sum(out: Out, x: Tensor, dim: Dims = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return x.cast(out.dtype).sum(dims_of(dim), keepdim=keepdim)


@lowers("mean.default", "mean.dim")
def _mean(out: Out, x: Tensor, dim: Dims = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return x.cast(out.dtype).mean(dims_of(dim), keepdim=keepdim)


@lowers("amax.default")
def _amax(out: Out, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return elementary.amax(x, dims_of(dim), keepdim)


@lowers("amin.default")
def _amin(out: Out, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return elementary.amin(x, dims_of(dim), keepdim)


@lowers("max.default")
def _max(out: Out, x: Tensor) -> Tensor: return elementary.amax(x)


@lowers("min.default")
def _min(out: Out, x: Tensor) -> Tensor: return elementary.amin(x)


@lowers("max.dim")
def _max_dim(out: Out, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return elementary.amax(x, dim, keepdim), elementary.argmax(x, dim, keepdim)


@lowers("min.dim")
def _min_dim(out: Out, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return elementary.amin(x, dim, keepdim), elementary.argmin(x, dim, keepdim)


@lowers("argmax.default")
def _argmax(out: Out, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _of_all(elementary.argmax(x, dim, keepdim), x, dim, keepdim)


@lowers("argmin.default")
def _argmin(out: Out, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _of_all(elementary.argmin(x, dim, keepdim), x, dim, keepdim)


def _of_all(place: Tensor, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """A place among all elements, which tinygrad has without dimensions."""
    return place.reshape((1,) * x.ndim) if dim is None and keepdim else place


@lowers("any.default", "any.dim", "any.dims")
def _any(out: Out, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return x.cast(dtypes.bool).any(dims_of(dim), keepdim=keepdim)


@lowers("all.default", "all.dim", "all.dims")
def _all(out: Out, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return x.cast(dtypes.bool).all(dims_of(dim), keepdim=keepdim)


@lowers("prod.default", "prod.dim_int")
def _prod(out: Out, x: Tensor, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return x.cast(out.dtype).prod(dim, keepdim=keepdim)


@lowers("var.correction")
def _var(out: Out, x: Tensor, dim: Dims = None, correction: Number | None = None,
         keepdim: bool = False) -> Tensor:
    return x.var(dims_of(dim), keepdim=keepdim, correction=_whole(correction))


@lowers("var_mean.correction")
def _var_mean(out: Out, x: Tensor, dim: Dims = None, correction: Number | None = None,
              keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.var_mean(dims_of(dim), keepdim=keepdim, correction=_whole(correction))


def _whole(correction: Number | None) -> int:
    if correction is None: return 1
    if correction != int(correction): raise Unsupported(f"a correction of {correction}")
    return int(correction)


@lowers("cumsum.default")
def _cumsum(out: Out, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    return x.cast(out.dtype).cumsum(dim) if x.ndim else x.cast(out.dtype)


@lowers("logsumexp.default")
def _logsumexp(out: Out, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    axes = dims_of(dim)
    if isinstance(axes, tuple) and len(axes) > 1:
        made = x.cast(out.dtype).logsumexp(axes, keepdim=True)
        return made if keepdim else made.sum(axes)
    return x.cast(out.dtype).logsumexp(axes[0] if isinstance(axes, tuple) else axes, keepdim=keepdim)


@lowers("_softmax.default")
def _softmax(out: Out, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x.softmax(dim, dtype=out.dtype)


@lowers("_log_softmax.default")
def _log_softmax(out: Out, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x.log_softmax(dim, dtype=out.dtype)
