"""Ranges, dimensions of extent 1, and blocks of points."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.onnx.elements import PLAIN, from_numpy, kind_of, plain
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import op, tinygrads


@op("Unsqueeze", since=13, host=(1,))
def unsqueeze(x: Tensor, axes: np.ndarray) -> Tensor:
    """x with dimensions of 1 at places of the result. One axis may be a scalar."""
    rank = x.ndim + axes.size
    shape = list(x.shape)
    for axis in sorted(int(each) % rank for each in axes.reshape(-1)): shape.insert(axis, 1)
    return x.reshape(shape)


@op("Squeeze", since=13, host=(1,))
def squeeze(x: Tensor, axes: np.ndarray | None = None) -> Tensor:
    """x without dimensions of 1, those at places or all."""
    places = [i for i, n in enumerate(x.shape) if n == 1] if axes is None else \
        [int(each) % x.ndim for each in axes.reshape(-1)]
    if any(x.shape[i] != 1 for i in places):
        raise ValueError(f"axes {places} of shape {x.shape} are not all of extent 1")
    return x.reshape([n for i, n in enumerate(x.shape) if i not in places])


@op("Slice", since=10, host=(1, 2, 3, 4))
def cut(x: Tensor, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None,
        steps: np.ndarray | None = None) -> Tensor:
    """x[start:end:step] of dimensions, the first ones if none are named."""
    cuts = [slice(None)] * x.ndim
    for i, axis in enumerate(range(len(starts)) if axes is None else axes.tolist()):
        step, first, last = 1 if steps is None else int(steps[i]), int(starts[i]), int(ends[i])
        # an end before the first element, which -1 does not say
        cuts[axis] = slice(first, None if step < 0 and last < -int(x.shape[axis]) else last, step)
    return x[tuple(cuts)]


@op("Slice")
def cut_1(x: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None) -> Tensor:
    """Cuts as `cut` does, by attributes."""
    return cut(x, np.asarray(starts), np.asarray(ends), None if axes is None else np.asarray(axes))


@op("Split", host=(1,))
def parts(x: Tensor, lengths: np.ndarray | None = None, split: Sequence[int] | None = None,
          num_outputs: int = 1, axis: int = 0) -> tuple[Tensor, ...]:
    """Parts of given lengths, or equal ones, of which the last may be shorter."""
    extent = int(x.shape[axis])
    if lengths is not None: split = lengths.tolist()
    if split is None:
        each = -(-extent // num_outputs)
        split = [max(0, min(each, extent - i * each)) for i in range(num_outputs)]
    return tuple(x.split(list(split), axis))


@op("Pad", host=(1, 2, 3))
def pad(x: Tensor, pads: np.ndarray | None = None, constant: np.ndarray | None = None,
        axes: np.ndarray | None = None, mode: str = "constant", value: float = 0.0,
        paddings: Sequence[int] = ()) -> Tensor:
    """x with elements before and after those of dimensions: a value, those at the border, mirrored ones, or
    those of the other end."""
    amounts = np.asarray(paddings if pads is None else pads).tolist()
    places = list(range(x.ndim)) if axes is None else axes.tolist()
    if mode != "wrap":
        number = value if constant is None else constant.item()
        made: Tensor = tinygrads("Pad")(x, *map(np.asarray, (amounts, number, places)), mode=mode)
        return made
    for before, after, d in zip(amounts, amounts[len(places):], places, strict=False):
        n = int(x.shape[d])
        first = -before % n     # of the repeated elements
        times = [1] * x.ndim
        times[d] = -(-(first + before + n + after) // n)
        cuts: list[tuple[int, int] | None] = [None] * x.ndim
        cuts[d] = (first, first + before + n + after)
        x = x.repeat(*times).shrink(tuple(cuts))
    return x


@op("SpaceToDepth")
def space_to_depth(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks of points as channels; in mode CRD a channel's points lie together."""
    order = "(c h1 w1)" if mode == "CRD" else "(h1 w1 c)"
    return x.rearrange(f"b c (h h1) (w w1) -> b {order} h w", h1=blocksize, w1=blocksize)


def _length(whole: range) -> int:
    """Its elements, more than len() can say."""
    return max(0, -((whole.start - whole.stop) // whole.step))


@op("Range", host=(0, 1, 2))
def range_(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Tensor:
    """start, start + delta, … below limit, in their type: their number, and floats, computed in float64."""
    if start.dtype.kind in "iu":
        whole = range(int(start.item()), int(limit.item()), int(delta.item()))
        budget().check_bytes((_length(whole),), start.dtype.itemsize)
        return Tensor.arange(len(whole)).cast(PLAIN[kind_of(start)]) * whole.step + whole.start
    first, last, step = (float(each.item()) for each in (start, limit, delta))
    number = max(math.ceil((last - first) / step), 0)
    budget().check_bytes((number,), 8)
    return plain(from_numpy((first + np.arange(number) * step).astype(start.dtype)))
