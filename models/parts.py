"""Parts of a checkpoint's tensors: indices along one axis, of which no more of a file is read.

Protocol: `cut(entry, part)` is an entry of the part, `read_part(entry, part)` its elements, or those of the
whole tensor for a part of None. Rows lie one behind the other: only they are read. Of columns each row's part
is read, or all of the rows if there is little between (checkpoint.py: SKIP). `layer_bytes` counts what is
read.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.quant.readers.reader import StoredMatrix, TensorPart

from .checkpoint import ITEM_BYTES, NUMPY_DTYPES, TensorEntry, read_array, read_strided, safetensors_dtype


class Stored(Protocol):
    """A matrix of a checkpoint, by its tensors: a `StoredMatrix`, or one of floats."""

    @property
    def tensors(self) -> tuple[str, ...]: ...


def cut(entry: TensorEntry, part: TensorPart) -> TensorEntry:
    """A part of an entry: of rows as they lie, of columns with strides."""
    strides = entry.strides or tuple(math.prod(entry.shape[i + 1:]) for i in range(len(entry.shape)))
    shape = (*entry.shape[:part.axis], part.count, *entry.shape[part.axis + 1:])
    path, offset = entry.file_offset
    whole = entry.strides is None and part.axis == 0
    return replace(entry, shape=shape, strides=None if whole else strides,
                   file_offset=(path, offset + part.first * strides[part.axis] * ITEM_BYTES[entry.dtype]))


def read_part(entry: TensorEntry, part: TensorPart | None) -> np.ndarray:
    """The elements of a part; bfloat16 and fp8 as unsigned integers of their bits. Raises `WeightError`."""
    if part is None or part.count == entry.shape[part.axis]: return read_array(entry)
    if entry.parts or entry.strides is not None:
        chosen = slice(part.first, part.first + part.count)
        return read_array(entry)[(*(slice(None),) * part.axis, chosen)]
    own = cut(entry, part)
    if own.strides is None: return read_array(own)
    return np.frombuffer(read_strided(own), NUMPY_DTYPES[safetensors_dtype(entry)]).reshape(own.shape)


def layer_bytes(layers: Iterable[Iterable[tuple[Stored, tuple[int, int]] | Tensor]],
                entries: Mapping[str, TensorEntry]) -> list[int]:
    """Bytes of the files that each quantised layer needs, by its matrices. Rows and columns count alone,
    without the bytes between."""
    made = []
    for layer in layers:
        stored = [part[0] for part in layer if not isinstance(part, Tensor)]
        used = {(name, each.parts.get(name) if isinstance(each, StoredMatrix) else None)
                for each in stored for name in each.tensors}
        made.append(sum(_nbytes(entries[name], part) for name, part in used))
    return made


def _nbytes(entry: TensorEntry, part: TensorPart | None) -> int:
    if part is None or entry.parts: return entry.nbytes
    return entry.nbytes // entry.shape[part.axis] * part.count
