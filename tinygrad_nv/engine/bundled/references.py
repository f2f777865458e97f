"""Weights of a model that lie in its checkpoint's files as they lie in memory.

Protocol: `ranges(model, directory)` gives for memory (base, offset, bytes) what the checkpoint has of it,
where the dtype is the same and all of it is there: q|k|v is three ranges. `confirmed(…)` compares bytes, so
that what a loader has changed is never referred to.
"""
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad.device import Buffer

from tinygrad_nv.models import weights
from tinygrad_nv.models.checkpoint import FLOAT_BYTES, open_checkpoint
from tinygrad_nv.models.multimodal import language_entries

if TYPE_CHECKING:
    from tinygrad_nv.models.llama import Llama

CHUNK = 64 << 20
Ranges = list[tuple[str, int, int]]     # a file, an offset and bytes


def ranges(model: Llama, directory: Path) -> dict[tuple[int, int, int], Ranges]:
    """Finds where memory of the model lies in the files of `directory`."""
    if not directory.is_dir(): return {}
    entries = language_entries(open_checkpoint(directory).entries)
    parts = defaultdict[tuple[int, int, int], list[tuple[int, str, int, int]]](list)
    for name, slot in weights.slots(model).items():
        at = slot.tensor.uop.buffer
        if not isinstance(at, Buffer) or (entry := entries.get(name)) is None: continue
        if entry.dtype not in FLOAT_BYTES or FLOAT_BYTES[entry.dtype] != slot.tensor.dtype.itemsize: continue
        file, offset = entry.file_offset
        parts[id(at.base), at.offset, at.nbytes].append((slot.offset, Path(file).name, offset, entry.nbytes))
    return {key: [each[1:] for each in sorted(found)] for key, found in parts.items()
            if sum(each[3] for each in found) == key[2]}


def confirm(found: Ranges | None, directory: Path, content: memoryview) -> list[Sequence[Any]]:
    """Returns the ranges if their bytes are the content; none otherwise."""
    at = 0
    for name, offset, nbytes in found or ():
        if not _same(directory / name, offset, content[at:at + nbytes]): return []
        at += nbytes
    return list(found or ())


def _same(path: Path, offset: int, content: memoryview) -> bool:
    file = os.open(path, os.O_RDONLY)
    try: return all(os.pread(file, CHUNK, offset + at)[:len(content) - at] == content[at:at + CHUNK]
                    for at in range(0, len(content), CHUNK))
    finally: os.close(file)
