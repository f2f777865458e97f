"""Reductions, scans and other operations along an axis.

Protocol: `sum`, `max`, `min`, `prod`, `any`, `all` of one axis, or of all axes one after the other; float16
and bfloat16 are summed in float32 and rounded once. `reduce` and `scan` combine with a function of the
user's: of pairs of scalars it gives a scalar, or a tuple where several tiles are combined together. It has to
be associative. The order of a reduction is the backend's: a sum of floats may differ in its last bits.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.language.elements import where
from tinygrad_nv.tile.language.ir import Region, TileType
from tinygrad_nv.tile.language.memory import arange
from tinygrad_nv.tile.language.trace import current, fail
from tinygrad_nv.tile.language.values import Tile, broadcast, cast, describe, unary

Combine = Callable[..., Any]
FEW_BINS = 16   # of a histogram, each of which is compared with all elements


def _axis(x: Tile, axis: int) -> int:
    _tile(x)
    if not isinstance(axis, int):
        fail(f"axis {describe(axis)} of {describe(x)}", "a constant integer",
             "tile.maximum and tile.minimum compare two tiles")
    made = axis + x.ndim if axis < 0 else axis
    if not 0 <= made < x.ndim:
        fail(f"axis {axis} of {describe(x)}",
             f"an axis from {-x.ndim} to {x.ndim - 1}" if x.ndim else "a tile of axes")
    return made


def _tile(x: Any) -> Tile:
    if not isinstance(x, Tile):
        fail(f"{describe(x)} ({type(x).__name__}) along an axis", "a tile",
             "load it: tile.load(x, …); of numbers make tile.full")
    return x


def _as_summand(x: Any) -> Tile:
    """Returns what is summed: booleans and integers of fewer than 32 bits as integers of 32."""
    short = not dtypes.is_float(_tile(x).dtype) and x.dtype.itemsize < 4
    return cast(x, dtypes.uint32 if dtypes.is_unsigned(x.dtype) else dtypes.int32) if short else x


def _along(x: Any, axis: int | None, keepdims: bool, fn: str) -> Tile:
    wide = _tile(x).dtype in (dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)
    made = cast(x, dtypes.float32) if wide else x
    if axis is None:
        for _ in range(x.ndim): made = _emit_reduce(made, made.ndim - 1, fn)
        if keepdims: made = made.reshape(*[1] * x.ndim)
    else:
        made = _emit_reduce(made, at := _axis(x, axis), fn)
        if keepdims: made = made.reshape(*(1 if i == at else extent for i, extent in enumerate(x.shape)))
    return cast(made, x.dtype) if wide else made


def _emit_reduce(x: Tile, axis: int, fn: str) -> Tile:
    shape = (*x.shape[:axis], *x.shape[axis + 1:])
    return Tile(current().emit("reduce", [x.value], [TileType(x.dtype, shape)], {"axis": axis, "fn": fn})[0])


def sum_(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """The sum along an axis; of booleans and short integers in 32 bits."""
    return _along(_as_summand(x), axis, keepdims, "add")


def prod(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """The product along an axis."""
    return _along(x, axis, keepdims, "mul")


def max_(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """The largest along an axis."""
    return _along(x, axis, keepdims, "max")


def min_(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """The smallest along an axis."""
    return _along(x, axis, keepdims, "min")


def mean(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """The mean along an axis; of integers in float32."""
    count = math.prod(_tile(x).shape) if axis is None else x.shape[_axis(x, axis)]
    made = sum_(cast(x, dtypes.float32), axis, keepdims) * (1 / count)
    return cast(made, x.dtype) if dtypes.is_float(x.dtype) else made


def any_(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """Whether one of the booleans along an axis holds."""
    return _along(_boolean(x), axis, keepdims, "max")


def all_(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """Whether all booleans along an axis hold."""
    return _along(_boolean(x), axis, keepdims, "min")


def _boolean(x: Tile) -> Tile: return _tile(x) if x.dtype == dtypes.bool else x != 0


def argmax(x: Tile, axis: int = -1) -> Tile:
    """The index of the largest along an axis, of equal ones the first: int32."""
    return _extreme(x, axis, lambda a, b: a > b)


def argmin(x: Tile, axis: int = -1) -> Tile:
    """The index of the smallest along an axis, of equal ones the first: int32."""
    return _extreme(x, axis, lambda a, b: a < b)


def _extreme(x: Tile, axis: int, better: Callable[[Tile, Tile], Tile]) -> Tile:
    at = _axis(x, axis)
    index = arange(x.shape[at]).reshape(*(x.shape[at] if i == at else 1 for i in range(x.ndim)))

    def combine(a: Tile, i: Tile, b: Tile, j: Tile) -> tuple[Tile, Tile]:
        first = better(a, b) | ((a == b) & (i < j))
        return where(first, a, b), where(first, i, j)
    return reduce((x, index.broadcast_to(*x.shape)), at, combine)[1]


def across_cluster(x: Tile, fn: str) -> Tile:
    """The one number of a tile of floats or of int32, `add`ed up over the programs of a cluster, or the
    largest of theirs (`max`): in all of them."""
    one = cast(x, dtypes.float32 if dtypes.is_float(x.dtype) else dtypes.int32).reshape()
    made = Tile(current().emit("across", [one.value], [TileType(one.dtype)], {"fn": fn})[0])
    return cast(made.reshape(*x.shape), x.dtype)


def reduce(x: Any, axis: int, combine: Combine) -> Any:
    """Tiles combined along an axis: combine(a, b) of scalars; of several tiles combine(a0, a1, …, b0, b1, …)
    gives as many results."""
    return _emit_combine("reduce", x, axis, combine, {})


def scan(x: Any, axis: int, combine: Combine, reverse: bool = False) -> Any:
    """Scans like `reduce`, with every partial result, that of the element itself included."""
    return _emit_combine("scan", x, axis, combine, {"reverse": bool(reverse)})


def _emit_combine(name: str, x: Any, axis: int, combine: Combine, attributes: dict[str, Any]) -> Any:
    several = isinstance(x, (tuple, list))
    tiles = broadcast(*map(_tile, x)) if several else [_tile(x)]
    at, kinds = _axis(tiles[0], axis), [each.dtype for each in tiles]
    region = _region(combine, kinds, several)
    shape = tiles[0].shape if name == "scan" else (*tiles[0].shape[:at], *tiles[0].shape[at + 1:])
    made = current().emit(name, [each.value for each in tiles], [TileType(kind, shape) for kind in kinds],
                          {"axis": at, **attributes}, [region])
    return tuple(map(Tile, made)) if several else Tile(made[0])


def _region(combine: Combine, kinds: Sequence[DType], several: bool) -> Region:
    with current().region([TileType(kind) for kind in (*kinds, *kinds)]) as region:
        found = combine(*map(Tile, region.arguments))
        results = list(found) if several and isinstance(found, (tuple, list)) else [found]
        if len(results) != len(kinds):
            fail(f"{len(results)} results of a combining function of {len(kinds)} tiles", "one for each tile")
        for result, kind in zip(results, kinds, strict=True):
            if not isinstance(result, Tile) or result.shape or result.dtype != kind:
                fail(f"a combining function that makes {describe(result)} of {kind.name}",
                     "scalars of the same dtype")
        region.yields = tuple(each.value for each in results)
    return region


def cumsum(x: Tile, axis: int = -1, reverse: bool = False) -> Tile:
    """Sums of all elements up to each along an axis; of booleans and short integers in 32 bits."""
    return _emit_scan(_as_summand(x), axis, "add", reverse)


def cumprod(x: Tile, axis: int = -1, reverse: bool = False) -> Tile:
    """Products of all elements up to each along an axis."""
    return _emit_scan(x, axis, "mul", reverse)


def cummax(x: Tile, axis: int = -1, reverse: bool = False) -> Tile:
    """The largest of all elements up to each along an axis."""
    return _emit_scan(x, axis, "max", reverse)


def _emit_scan(x: Tile, axis: int, fn: str, reverse: bool) -> Tile:
    wide = dtypes.is_float(_tile(x).dtype)
    made = cast(x, dtypes.float32) if wide else x
    value, = current().emit("scan", [made.value], [made.value.type],
                            {"axis": _axis(x, axis), "fn": fn, "reverse": bool(reverse)})
    return cast(Tile(value), x.dtype)


def gather(x: Tile, index: Tile, axis: int = -1) -> Tile:
    """x taken at `index` along an axis, elsewhere at the same place: as torch.gather. Indices lie within."""
    at = _axis(x, axis)
    if not isinstance(index, Tile) or index.dtype != dtypes.int32 or index.ndim != x.ndim:
        fail(f"tile.gather of {describe(x)} with {describe(index)}", "int32 indices with as many axes")
    if any(a != b for i, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if i != at):
        fail(f"tile.gather of {x.shape} with {index.shape} along axis {at}", "the same extents of other axes")
    return Tile(current().emit("gather", [x.value, index.value], [TileType(x.dtype, index.shape)],
                               {"axis": at})[0])


def sort(x: Tile, axis: int = -1, descending: bool = False) -> Tile:
    """Sorted along an axis; NaN is not ordered."""
    return Tile(current().emit("sort", [_tile(x).value], [x.value.type],
                               {"axis": _axis(x, axis), "descending": bool(descending)})[0])


def histogram(x: Tile, bins: int) -> Tile:
    """How many elements of a tile of integers are 0, 1, … bins - 1: (bins), int32."""
    if dtypes.is_float(_tile(x).dtype): fail(f"the histogram of {describe(x)}", "a tile of integers",
                                             "cast it: tile.cast(x, int32)")
    flat = cast(x, dtypes.int32).reshape(math.prod(x.shape))
    if bins > FEW_BINS: return ranks(flat, bins)[1]
    return sum_(cast(flat[None, :] == arange(bins)[:, None], dtypes.int32), 1)


def ranks(x: Tile, bins: int) -> tuple[Tile, Tile]:
    """How many elements ahead of each one are the same number of 0, 1, … bins - 1, 0 of another number; and
    how many are each of these: int32 (n) and (bins). They are a counting sort's."""
    if _tile(x).ndim != 1 or x.dtype != dtypes.int32:
        fail(f"the ranks of {describe(x)}", "a tile of int32 with one axis",
             "reshape it: tile.reshape(x, n); cast it: tile.cast(x, int32)")
    if isinstance(bins, Tile) or int(bins) < 1: fail(f"bins={describe(bins)}", "a positive constant")
    kinds = [x.value.type, TileType(dtypes.int32, (int(bins),))]
    rank, counts = map(Tile, current().emit("rank", [x.value], kinds, {"bins": int(bins)}))
    return rank, counts


def softmax(x: Tile, axis: int = -1) -> Tile:
    """exp(x - max) / sum along an axis, in float32."""
    wide = cast(x, dtypes.float32)
    made = unary("exp2_small", (wide - max_(wide, axis, keepdims=True)) * (1 / math.log(2)))
    return cast(made / sum_(made, axis, keepdims=True), x.dtype)

