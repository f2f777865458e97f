"""safetensors files, written as their tensors are made: no more than one is in memory.

Protocol: `write(path, tensors, count)` takes tensors, at most `count`, as they come. The header has room for
as many before the first byte of data. The file has its name when it is whole, and not before.

Format: https://github.com/huggingface/safetensors.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tinygrad_nv.errors import WeightError

ENTRY_BYTES = 320   # of a header, for a tensor: its name and four numbers
Tensors = Iterable[tuple[str, str, np.ndarray]]     # name, safetensors' dtype, elements or their bits


def write(path: Path, tensors: Tensors, count: int) -> dict[str, int]:
    """Writes a file: bytes of each tensor. Raises `WeightError` where the disk does not take it; nothing is
    left then."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    sizes, room, offset = dict[str, int](), 8 * (64 + ENTRY_BYTES * count // 8), 0
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.seek(8 + room)
            for name, dtype, array in tensors:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                file.write(data)
                entries[name] = {"dtype": dtype, "shape": list(array.shape),
                                 "data_offsets": [offset, offset + len(data)]}
                sizes[name] = len(data)
                offset += len(data)
            text = json.dumps(entries, separators=(",", ":")).encode()
            assert len(text) <= room, "names are shorter"
            file.seek(0)
            file.write(room.to_bytes(8, "little") + text.ljust(room))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError): raise unwritable(path, error) from error
        raise
    return sizes


def unwritable(path: Path, error: OSError) -> WeightError:
    """Returns the error of a file that the disk does not take."""
    return WeightError(f"{path} cannot be written: {error.strerror}", "a folder with room for the model",
                       "free some space, or choose another --out")
