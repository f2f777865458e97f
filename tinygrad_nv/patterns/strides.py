"""Strides of each dimension of a named function's argument: its elements' places.

Protocol: `lay_out(x)` is the storage that an argument is a view of, and a stride for each dimension, in
elements (0 along an extent of 1, or where all elements are the same one). An argument that is no such view,
as one that is computed, is copied; so is one that goes backwards: kernels take strides for numbers without a
sign. `place_rows(x)` is where rows of x (…, K) lie.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tinygrad.dtype import DType
from tinygrad.helpers import all_int
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.patterns.contraction import Unsupported, is_storage, side
from tinygrad_nv.patterns.index import Space, largest
from tinygrad_nv.tile.gemm.spec import Operand


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


def lay_out_rows(x: UOp) -> Laid:
    """An argument in place where elements along its last axis lie side by side, else copied."""
    found = lay_out(x)
    return found if found.strides[-1] == 1 or int(x.shape[-1]) == 1 else copy_dense(x)


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


def symbolic_rows(x: UOp) -> UOp | None:
    """The symbolic number of rows. Raises `Unsupported` for a symbolic extent beside others."""
    many = [extent for extent in x.shape[:-1] if largest(extent) != 1]
    symbols = [extent for extent in many if isinstance(extent, UOp)]
    if symbols and (len(many) > 1 or symbols[0].op is not Ops.PARAM):
        raise Unsupported("a symbolic extent that is not the number of rows")
    return symbols[0] if symbols else None


def place_rows(x: UOp) -> tuple[UOp, Operand]:
    """Returns where rows of x lie, in place where they are at one stride with columns side by side, else
    copied."""
    for way in (lay_out, copy_dense):
        found = way(x)
        *outer, inner = zip(x.shape, found.strides, strict=True)
        many = [(largest(extent), stride) for extent, stride in outer if largest(extent) != 1]
        even = all(stride == after * extent for (_, stride), (extent, after) in pairwise(many))
        if even and (inner[1] == 1 or inner[0] == 1):
            return found.storage, Operand(x.dtype, many[-1][1] if many else inner[0], 1, (), found.offset)
    raise Unsupported("rows of x that are not at one stride")
