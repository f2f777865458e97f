"""Strides of each dimension of a named function's argument: its elements' places.

Protocol: `lay_out(x)` is the storage that an argument is a view of, and a stride for each dimension, in
elements (0 along an extent of 1, or where all elements are the same one). An argument that is no such view,
as one that is computed, is copied; so is one that goes backwards: kernels take strides for numbers without a
sign. """
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType
from tinygrad.helpers import all_int
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns.contraction import is_storage, side
from tinygrad_nv.patterns.index import Space, largest


@dataclass(frozen=True)
class Laid:
    """Element (i, j, …) of an argument lies at offset + Σ strides · (i, j, …) of `storage`."""
    storage: UOp
    strides: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> DType: return self.storage.dtype


def lay_out(x: UOp) -> Laid:
    """An argument, in place where it can be read there."""
    return _in_place(x) or copy_dense(x)


def copy_dense(x: UOp) -> Laid:
    """An argument copied, in order."""
    strides, pitch = [], 1
    for extent in reversed(x.shape):
        strides.append(pitch if largest(extent) != 1 else 0)
        pitch *= largest(extent)
    # a call realizes what it takes; CONTIGUOUS would copy a symbolic one once more
    return Laid(x.contiguous() if all_int(x.shape) else x, tuple(reversed(strides)), 0)


def _in_place(x: UOp) -> Laid | None:
    space = Space()
    ranges = space.ranges(x.shape)
    found = side(space, x, ranges, False, is_storage).resolve(space)
    strides = []
    for index in ranges:
        parts = [leaf for r in index.strides for leaf in space.leaves(r)]
        stride = found.lies.strides.get(parts[-1], 0) if parts else 0
        reach = stride
        for part in reversed(parts):  # a dimension that was divided must be one in memory
            if found.lies.strides.get(part, 0) != reach: return None
            reach *= largest(space.extents[part])
        if stride < 0: return None
        strides.append(stride)
    return Laid(found.storage, tuple(strides), found.lies.offset)
