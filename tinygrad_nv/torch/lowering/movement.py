"""Views: reshapes, permutations, slices, concatenations. Nothing is copied until a kernel needs it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.torch.lowering.table import Number, Out, Unsupported, fill, lowers


def axis(dim: int, ndim: int) -> int: return dim + ndim if dim < 0 else dim


def span(start: int | None, end: int | None, extent: int) -> tuple[int, int]:
    """First and end of a slice within an extent, as torch clamps them."""
    first, last, _ = slice(start, end).indices(extent)
    return first, max(first, last)


@lowers("view.default", "_unsafe_view.default", "reshape.default")
def _view(out: Out, x: Tensor, size: Sequence[int]) -> Tensor: return x.reshape(tuple(size))


@lowers("unsqueeze.default")
def _unsqueeze(out: Out, x: Tensor, dim: int) -> Tensor: return x.unsqueeze(dim)


@lowers("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(out: Out, x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis(d, x.ndim) for d in dims}
    return x.reshape(tuple(n for i, n in enumerate(x.shape) if not (n == 1 and i in gone)))


@lowers("expand.default")
def _expand(out: Out, x: Tensor, size: Sequence[int], **kwargs: Any) -> Tensor: return x.expand(tuple(size))


@lowers("permute.default")
def _permute(out: Out, x: Tensor, dims: Sequence[int]) -> Tensor: return x.permute(tuple(dims))


@lowers("transpose.int")
def _transpose(out: Out, x: Tensor, dim0: int, dim1: int) -> Tensor: return x.transpose(dim0, dim1)


@lowers("t.default")
def _t(out: Out, x: Tensor) -> Tensor: return x if x.ndim < 2 else x.transpose(0, 1)


@lowers("slice.Tensor")
def _slice(out: Out, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None,
           step: int = 1) -> Tensor:
    dim = axis(dim, x.ndim)
    if step == 1:
        return x.shrink(tuple(span(start, end, x.shape[i]) if i == dim else None for i in range(x.ndim)))
    return x[(slice(None),) * dim + (slice(start, end, step),)]


@lowers("select.int")
def _select(out: Out, x: Tensor, dim: int, index: int) -> Tensor:
    return x[(slice(None),) * axis(dim, x.ndim) + (index,)]


@lowers("split.Tensor")
def _split(out: Out, x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]: return x.split(size, dim)


@lowers("split_with_sizes.default")
def _split_sizes(out: Out, x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    return x.split(list(sizes), dim)


@lowers("unbind.int")
def _unbind(out: Out, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_select(out, x, dim, i) for i in range(x.shape[axis(dim, x.ndim)]))


@lowers("cat.default")
def _cat(out: Out, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # torch lets an empty vector stand beside tensors of any number of dimensions
    given = [x.cast(out.dtype) for x in tensors if x.shape != (0,)]
    if not given: return tensors[0].cast(out.dtype)
    return given[0].cat(*given[1:], dim=dim) if len(given) > 1 else given[0]


@lowers("stack.default")
def _stack(out: Out, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    given = [x.cast(out.dtype) for x in tensors]
    return given[0].stack(*given[1:], dim=dim)


@lowers("repeat.default")
def _repeat(out: Out, x: Tensor, repeats: Sequence[int]) -> Tensor: return x.repeat(tuple(repeats))


@lowers("flip.default")
def _flip(out: Out, x: Tensor, dims: Sequence[int]) -> Tensor: return x.flip(tuple(dims))


@lowers("constant_pad_nd.default")
def _pad(out: Out, x: Tensor, pad: Sequence[int], value: Number = 0) -> Tensor:
    return x.pad(tuple(pad), value=value)


@lowers("tril.default")
def _tril(out: Out, x: Tensor, diagonal: int = 0) -> Tensor: return x.tril(diagonal)


@lowers("triu.default")
def _triu(out: Out, x: Tensor, diagonal: int = 0) -> Tensor: return x.triu(diagonal)


@lowers("slice_scatter.default")
def _slice_scatter(out: Out, x: Tensor, src: Tensor, dim: int = 0, start: int | None = None,
                   end: int | None = None, step: int = 1) -> Tensor:
    if step != 1: raise Unsupported(f"slice_scatter with a step of {step}")
    dim = axis(dim, x.ndim)
    first, last = span(start, end, x.shape[dim])
    before = x.shrink(tuple((0, first) if i == dim else None for i in range(x.ndim)))
    after = x.shrink(tuple((last, n) if i == dim else None for i, n in enumerate(x.shape)))
    pieces = [each for each in (before, src.cast(out.dtype), after) if each.shape[dim]]
    return pieces[0].cat(*pieces[1:], dim=dim) if len(pieces) > 1 else pieces[0]


@lowers("slice_backward.default")
def _slice_backward(out: Out, grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int,
                    step: int) -> Tensor:
    if step != 1: raise Unsupported(f"the gradient of a slice with a step of {step}")
    dim = axis(dim, len(sizes))
    first, last = span(start, end, sizes[dim])
    return grad.pad(tuple((first, n - last) if i == dim else (0, 0) for i, n in enumerate(sizes)))


@lowers("select_backward.default")
def _select_backward(out: Out, grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim = axis(dim, len(sizes))
    index += sizes[dim] * (index < 0)
    around = tuple((index, n - index - 1) if i == dim else (0, 0) for i, n in enumerate(sizes))
    return grad.unsqueeze(dim).pad(around)


@lowers("select_scatter.default")
def _select_scatter(out: Out, x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    dim = axis(dim, x.ndim)
    index += x.shape[dim] * (index < 0)
    return _slice_scatter(out, x, src.unsqueeze(dim), dim, index, index + 1)


@lowers("sym_size.int")
def _sym_size(out: Out, x: Tensor, dim: int) -> Any: return x.shape[dim]


@lowers("new_empty_strided.default", "empty_strided.default")
def _empty_strided(out: Out, *args: Any, **kwargs: Any) -> Tensor:
    size = args[1] if isinstance(args[0], Tensor) else args[0]
    return fill(0, tuple(size), out)
