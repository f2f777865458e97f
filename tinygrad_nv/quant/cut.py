"""A part of a quantised matrix: some of its rows, or some of its columns.

Protocol: `cut_matrix(matrix, shape, axis, first, count, name)` is rows (axis 0) or columns (axis 1) [first,
first + count) of a stored matrix, as a matrix of its own and of the same type. It is read whole and then cut,
so a part is the same in every format. Raises `WeightError` where a block of one scale would be cut, where a
row of the part is no whole number of bytes, and of columns in an order of their own.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.readers.reader import Get, StoredMatrix
from tinygrad_nv.quant.types import QType, Scale, buffers

AXES = ("rows", "columns")
FEWER = "use fewer tensor parallel ranks, or a checkpoint with smaller groups"


def cut_matrix(matrix: StoredMatrix, shape: tuple[int, int], axis: int, first: int, count: int,
               name: str) -> StoredMatrix:
    """Rows or columns [first, first + count) of a matrix [N, K]; `name` is the layer's, for messages."""
    type = matrix.type
    _require_whole_groups(type, shape, axis, first, count, name)

    def arrays(get: Get) -> dict[str, np.ndarray]:
        whole, made = buffers(type, *shape), {}
        for key, array in matrix.arrays(get).items():
            if key == "order": made[key] = array
            elif key in ("codes", "high"):
                bits = type.low_bits if key == "codes" else type.bits - type.low_bits
                step = (1, 1) if axis == 0 else (bits, 8)
                made[key] = _part(array.reshape(shape[0], -1), axis, first * step[0] // step[1],
                                  (first + count) * step[0] // step[1])
            else:
                scale = type.outer if key.startswith("outer") else type.scale
                assert scale is not None
                made[key] = _of_blocks(array.reshape(whole[key].shape), scale, shape, axis, first, count)
        return made
    return replace(matrix, arrays=arrays)


def _part(array: np.ndarray, axis: int, begin: int, end: int) -> np.ndarray:
    return array[begin:end] if axis == 0 else array[:, begin:end]


def _of_blocks(array: np.ndarray, scale: Scale, shape: tuple[int, int], axis: int, first: int,
               count: int) -> np.ndarray:
    """Scales of the blocks of a part."""
    block = _extent(scale, shape, axis)
    return array if not block else _part(array, axis, first // block, -(-(first + count) // block))


def _extent(scale: Scale, shape: tuple[int, int], axis: int) -> int:
    """Rows or columns of a block, 0 where one has all."""
    block = (scale.rows, scale.columns)[axis]
    return 0 if block >= shape[axis] else block


def _require_whole_groups(type: QType, shape: tuple[int, int], axis: int, first: int, count: int,
                          name: str) -> None:
    end, what = first + count, AXES[axis]
    part = f"{name}, {list(shape)} of {type}, is cut to {what} {first} to {end}"
    if axis and type.permuted:
        raise WeightError(f"{part}, and its groups have columns from everywhere (act order)",
                          "groups of neighbouring columns",
                          "use one device, or a checkpoint without act order (desc_act, actorder)")
    for scale in (type.scale, type.outer):
        block = 0 if scale is None else _extent(scale, shape, axis)
        if block and (first % block or (end % block and end != shape[axis])):
            raise WeightError(f"{part}, and a scale is of {block} {what}",
                              f"parts of whole groups of {block}", FEWER)
    if axis and any(extent * bits % 8 for extent in (first, count)
                    for bits in (type.low_bits, type.bits - type.low_bits)):
        raise WeightError(f"{part}, which are no whole bytes of {type.bits} bits", "parts of whole bytes",
                          FEWER)
