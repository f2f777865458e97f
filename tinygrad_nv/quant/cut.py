"""A part of a quantised matrix: some of its rows, or some of its columns.

Protocol: `part_of(reader, layer, shape, stored, part)` is rows (axis 0) or columns (axis 1) [first, first +
count) of a layer's matrix, as a matrix of its own and of the same type. Where the reader says how rows and
columns lie in its tensors (`StoredMatrix.cuts`), the part is a smaller matrix in parts of these tensors, and
no more is read; elsewhere `cut_matrix` reads the matrix whole and cuts it, which works in every format. Both
give the same buffers. They raise `WeightError` where a block of one scale would be cut, where a row of the
part is no whole number of bytes, and of columns in an order of their own.
"""
from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.readers.reader import Get, Reader, Stored, StoredMatrix, Strides, TensorPart
from tinygrad_nv.quant.types import QType, Scale, buffers

AXES = ("rows", "columns")
Shape = tuple[int, int]
FEWER = "use fewer tensor parallel ranks, or a checkpoint with smaller groups"


def part_of(reader: Reader, layer: str, shape: Shape, stored: Stored, part: TensorPart | None
            ) -> StoredMatrix | None:
    """A part of a layer's matrix, or all of it; None where the layer is not quantised. Raises
    `WeightError`."""
    whole = reader.matrix(layer, shape, stored)
    if whole is None or part is None: return whole
    _require_whole_groups(whole.type, shape, part.axis, part.first, part.count, layer)
    found = _in_parts(reader, layer, whole, shape, stored, part)
    return found or cut_matrix(whole, shape, part.axis, part.first, part.count, layer)


def _in_parts(reader: Reader, layer: str, whole: StoredMatrix, shape: Shape, stored: Stored,
              part: TensorPart) -> StoredMatrix | None:
    """The part as a matrix in parts of the tensors; None where these cannot be cut so."""
    if whole.cuts is None: return None
    lie = {name: along for name in whole.tensors if (along := whole.cuts.get(name, (None, None))[part.axis])}
    parts, headers = dict[str, TensorPart](), dict[str, tuple[str, tuple[int, ...]]]()
    for name, along in lie.items():
        kind, extents = stored[name]
        found = _indices(along, shape[part.axis], extents[along.axis], part)
        if found is None: return None
        parts[name] = found
        headers[name] = kind, (*extents[:found.axis], found.count, *extents[found.axis + 1:])
    small = (part.count, shape[1]) if part.axis == 0 else (shape[0], part.count)
    both: Stored = ChainMap(headers, stored)    # type: ignore[arg-type]  # which is only read
    try: own = reader.matrix(layer, small, both)
    except WeightError: return None
    if own is None or own.type != whole.type: return None
    read = own.arrays

    def arrays(get: Get) -> dict[str, np.ndarray]:
        def of_part(name: str) -> np.ndarray:
            array, along = get(name), lie.get(name)
            if name == whole.extents and tuple(array.reshape(-1)) == shape: return np.array(small)
            if along is None or not along.numbers: return array
            return np.where(array < 0, array, array - part.first // along.numbers)
        return read(of_part)
    return replace(own, arrays=arrays, parts=parts)


def _indices(along: Strides, extent: int, size: int, part: TensorPart) -> TensorPart | None:
    """Returns where a part of rows or columns, `extent` in all, lies along the axis of a tensor, `size` long;
    None where it does not begin and end with an index."""
    end = part.first + part.count
    if -(-extent * along.count // along.extent) != size: return None    # stored in another way
    if part.first % along.extent or (end % along.extent and end != extent): return None
    first = part.first // along.extent * along.count
    last = size if end == extent else end // along.extent * along.count
    return TensorPart(along.axis, first, last - first)


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
