"""Ranges, dimensions of extent 1, and blocks of points."""
from __future__ import annotations

import math

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.onnx.elements import PLAIN, from_numpy, kind_of, plain
from tinygrad_nv.onnx.table import op


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


@op("SpaceToDepth")
def space_to_depth(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks of points as channels; in mode CRD a channel's points lie together."""
    order = "(c h1 w1)" if mode == "CRD" else "(h1 w1 c)"
    return x.rearrange(f"b c (h h1) (w w1) -> b {order} h w", h1=blocksize, w1=blocksize)


@op("Range", host=(0, 1, 2))
def range_(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Tensor:
    """start, start + delta, … below limit, in their type: their number, and floats, computed in float64."""
    if start.dtype.kind in "iu":
        whole = range(int(start.item()), int(limit.item()), int(delta.item()))
        return Tensor.arange(len(whole)).cast(PLAIN[kind_of(start)]) * whole.step + whole.start
    first, last, step = (float(each.item()) for each in (start, limit, delta))
    number = max(math.ceil((last - first) / step), 0)
    return plain(from_numpy((first + np.arange(number) * step).astype(start.dtype)))
