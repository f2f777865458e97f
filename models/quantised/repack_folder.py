"""Folders of repacked weights on disk: one for each model, named by all that their bytes depend on.

Protocol: `folder_of(model, plan, entries)` is a model's folder, which need not be there. Its name has two
halves: one of the checkpoint's files and of what they are loaded as (device, dtype, quantization), one of
their sizes, times, tensors, and of the code that repacks. Of folders with the same first half only the newest
is of use. `make_room` removes the others of them, and then the models that were loaded longest ago, until
NV_REPACK_CACHE is kept and at least as much of the disk stays free as is written.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from tinygrad_nv import cache, config, private, quant
from tinygrad_nv import functional as F
from tinygrad_nv.quant.readers.reader import StoredMatrix
from tinygrad_nv.quant.types import nbytes

from ..checkpoint import TensorEntry
from ..llama import Llama
from .layers import Plan

GB = 10**9
PART = ".part"              # of files that are being written
ABANDONED_S = 3600          # after which such a file is of a process that ended
Stamp = tuple[str, int, int, int]


def root() -> Path:
    """Returns the folder that holds all others."""
    return cache.readable() / "repacked"


def count_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError): total += path.stat().st_size * path.is_file()
    return total


@dataclass(frozen=True)
class Folder:
    """A model's. `key` is all of what its bytes depend on and the cache's own key, hashed; `stamps` are those
    of the checkpoint's files, `sizes` bytes of each layer."""
    path: Path
    key: str
    stamps: tuple[Stamp, ...]
    sizes: tuple[int, ...]

    def layer(self, number: int) -> Path:
        """A layer's file."""
        return self.path / f"{number:04}.layer"

    def touch(self) -> None:
        """Says that it was used now."""
        with contextlib.suppress(OSError): os.utime(self.path)

    def keep(self, number: int, write: Callable[[FileIO], None]) -> None:
        """Makes a layer's file, beside its place and renamed. Raises OSError, and leaves nothing then."""
        private.make(self.path)
        handle, name = tempfile.mkstemp(PART, dir=self.path)
        try:
            with open(handle, "wb", buffering=0) as file: write(file)
            if _stamps(stamp[0] for stamp in self.stamps) != self.stamps:
                raise OSError("files of the checkpoint changed while they were read")
            os.replace(name, self.layer(number))
        except BaseException:
            with contextlib.suppress(OSError): os.unlink(name)
            raise

    def make_room(self, layers: Iterable[int]) -> str:
        """Removes what is in the way of layers that will be written; why they cannot be, "" where they
        can."""
        bound, wanted = int(config.get("NV_REPACK_CACHE")) * GB, sum(self.sizes[each] for each in layers)
        try:
            private.make(self.path)
            for path in self.path.glob(f"*{PART}"):
                if time.time() - path.stat().st_mtime > ABANDONED_S: path.unlink()
            own, free = count_bytes(self.path), shutil.disk_usage(self.path).free
            others = {path: count_bytes(path) for path in sorted(
                (each for each in self.path.parent.iterdir() if each != self.path), key=_last_used)}
        except OSError as error: return error.strerror or str(error)
        if own + wanted > bound:
            return f"{(own + wanted) / GB:.1f} GB are more than NV_REPACK_CACHE, {bound // GB}"
        if free + sum(others.values()) < 2 * wanted:
            return f"of {free / GB:.1f} GB that are free {wanted / GB:.1f} would be used, more than half"
        superseded = [path for path in others if path.name.split("-")[0] == self.path.name.split("-")[0]]
        for path in [*superseded, *(path for path in others if path not in superseded)]:
            fits = own + wanted + sum(others.values()) <= bound and free >= 2 * wanted
            if fits and path not in superseded: break
            free += others.pop(path)
            shutil.rmtree(path, ignore_errors=True)
        return ""


def folder_of(model: Llama, plan: Plan, entries: Mapping[str, TensorEntry]) -> Folder | None:
    """A model's folder; None where nothing is kept: NV_REPACK_CACHE=0, or a cache directory that is
    temporary, or a checkpoint that cannot be looked at."""
    if not config.get("NV_REPACK_CACHE") or cache.is_temporary(cache.directory()): return None
    if (secret := private.key(root().parent)) is None: return None
    try: stamps = _stamps({os.path.realpath(path) for each in entries.values() for path in _files(each)})
    except OSError: return None
    parallel = model.parallel
    rank = () if parallel is None else (parallel.group.rank, parallel.ranks, parallel.experts)
    how = (F.weights_key(model.device), model.dtype.name, model.int8_inputs, repr(model.config),
           json.dumps(model.config.quantization, sort_keys=True, default=repr), *rank)
    first = _hash([stamp[0] for stamp in stamps], how)
    found = sorted(map(_key_of, entries.values()))
    key = _hash(first, stamps, found, _code(), importlib.metadata.version("tinygrad"))
    sizes = tuple(sum(_part_bytes(model, *part) for part in layer.parts if isinstance(part, tuple))
                  for layer in plan.layers)
    return Folder(root() / f"{first[:24]}-{key[:24]}", _hash(key, secret), stamps, sizes)


def _part_bytes(model: Llama, stored: Any, shape: tuple[int, int]) -> int:
    if isinstance(stored, StoredMatrix): return nbytes(stored.type, *shape)
    return shape[0] * shape[1] * model.dtype.itemsize


def _files(entry: TensorEntry) -> set[str]:
    return {entry.file_offset[0], *(path for part in entry.parts for path in _files(part))}


def _key_of(entry: TensorEntry) -> str:
    """A tensor, wherever its file was opened from."""
    path, offset = entry.file_offset
    return repr((entry.name, entry.dtype, entry.shape, os.path.realpath(path), offset, entry.strides,
                 [_key_of(part) for part in entry.parts]))


def _stamps(paths: Iterable[str]) -> tuple[Stamp, ...]:
    """Size and times of files. That of the last change of the inode, too: a copy that sets the time of the
    last change of the bytes does not set it."""
    found = ((path, os.stat(path)) for path in sorted(paths))
    return tuple((path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in found)


@functools.cache
def _code() -> str:
    """Returns the digest of all files that read and repack weights, and of kernels, which say what layouts
    they read."""
    folders = (str(Path(quant.__path__[0]).parent), str(Path(__file__).parents[1]))
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    return _hash(*(path.read_text(encoding="utf-8") for path in paths))


def _hash(*values: Any) -> str:
    return hashlib.sha256("\0".join(map(repr, values)).encode()).hexdigest()


def _last_used(folder: Path) -> float:
    try: return folder.stat().st_mtime
    except OSError: return 0.0
