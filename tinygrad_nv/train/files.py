"""Files that survive a process that is killed, and a machine that loses power.

Protocol: `write_file(path, chunks)` creates a file, writes it, and syncs it to the disk; it returns size and
SHA-256. A name becomes durable with `sync_folder` of its folder. `refusal(path, error)` says what an OSError
means. All errors are `CheckpointError`.

SHA-256, because CPUs of servers have instructions for it: 1.5 GB/s of a core against 0.7 GB/s of BLAKE2b, and
`sha256sum` checks it by hand.

safetensors files (https://github.com/huggingface/safetensors: 8-byte little-endian header length, JSON, data)
are made while they are written, split into files of a limited size. A `Source` says dtype and shape of a
tensor, and yields its bytes when it is its turn: no more than a chunk of it need be in memory.
`shards(sources, limit)` groups sources into files, `write_tensors(path, sources)` writes one of them. Tensors
of wider elements come first, as in files of its own library, so that each is aligned.
"""
from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.models.checkpoint import ITEM_BYTES

CHUNK = 16 << 20    # bytes that are hashed and written at a time
FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM)
WRITABLE = "a directory that can be written"
PARTIAL = ".export.partial"
Chunks = Iterable[bytes | bytearray | memoryview]
DTYPES: dict[DType, str] = {
    dtypes.float64: "F64", dtypes.float32: "F32", dtypes.float16: "F16", dtypes.bfloat16: "BF16",
    dtypes.fp8e4m3: "F8_E4M3", dtypes.fp8e5m2: "F8_E5M2", dtypes.int8: "I8", dtypes.uint8: "U8",
    dtypes.int16: "I16", dtypes.uint16: "U16", dtypes.int32: "I32", dtypes.uint32: "U32",
    dtypes.int64: "I64", dtypes.uint64: "U64", dtypes.bool: "BOOL"}


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""
    nbytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
    """Creates a file that is not there, and syncs it to the disk. Raises OSError; what was written so far is
    left."""
    digest, nbytes = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for chunk in chunks:
            whole = memoryview(chunk).cast("B")
            for begin in range(0, len(whole), CHUNK):
                piece = whole[begin:begin + CHUNK]
                digest.update(piece)
                _write_all(file, piece)
            nbytes += len(whole)
        os.fsync(file)
    finally: os.close(file)
    return FileRecord(nbytes, digest.hexdigest())


def _write_all(file: int, data: memoryview) -> None:
    while len(data): data = data[os.write(file, data):]


def read_record(path: Path) -> FileRecord:
    """Size and hash of a file as it is. Raises OSError."""
    digest, buffer, nbytes = hashlib.sha256(), memoryview(bytearray(1 << 20)), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            nbytes += count
    return FileRecord(nbytes, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable: files that were created, renamed or removed."""
    if os.name != "posix": return     # other systems open no folders
    file = os.open(folder, os.O_RDONLY)
    try: os.fsync(file)
    finally: os.close(file)


def make_folder(folder: Path) -> None:
    """Creates a folder and those above it, durably. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing): sync_folder(each.parent)


def refusal(path: Path, error: OSError, nbytes: int = 0) -> CheckpointError:
    """Returns the error of a path that cannot be written, or removed; `nbytes` are written there in all."""
    if error.errno in FULL:
        needed = f"{_words(nbytes)} are to be written" if nbytes else "more is to be written"
        return CheckpointError(f"{path} cannot be written: {error.strerror}; {needed}, {_free(path)} are "
                               "free", "room for one checkpoint more than are kept",
                               "free some space, keep fewer, or choose another directory; checkpoints before "
                               "this one are as they were")
    if error.errno == errno.EROFS: fix = "choose a directory of a file system that is not read-only"
    elif error.errno in FORBIDDEN: fix = "change its permissions, or choose another directory"
    elif error.errno == errno.ENOENT: fix = "it was removed in use: let one process alone change it"
    else: fix = "check the disk, or choose another directory; checkpoints before this one are as they were"
    return CheckpointError(f"{path} cannot be written: {error.strerror}", WRITABLE, fix)


def _free(path: Path) -> str:
    """Returns the free space of the file system of a path that may not be there."""
    there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    return _words(shutil.disk_usage(there).free)


def _words(nbytes: int) -> str:
    for unit, size in (("GB", 10 ** 9), ("MB", 10 ** 6), ("KB", 10 ** 3)):
        if nbytes >= size: return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def replace_folder(directory: Path, marker: str, stale: Iterable[str], write: Callable[[Path], None],
             nbytes: int) -> Path:
    """Changes files of a directory together. `write` makes all new ones, of about `nbytes` bytes, in a folder
    inside, each synced. Then `marker`, without which nothing loads the directory, is removed, the files get
    their places, files that match `stale` and are not new are removed, and the new marker comes last. A
    process that is killed in between leaves a directory without its marker, never a mixture that loads.
    Raises `CheckpointError` where it cannot be written; before the files get their places, what was there is
    as it was."""
    staged = directory / PARTIAL
    try:
        make_folder(directory)
        if staged.exists(): shutil.rmtree(staged)
        staged.mkdir()
        try:
            write(staged)
            _place(staged, directory, marker, stale)
        finally: shutil.rmtree(staged, ignore_errors=True)
    except OSError as error: raise refusal(Path(error.filename or directory), error, nbytes) from error
    return directory


def _place(staged: Path, directory: Path, marker: str, stale: Iterable[str]) -> None:
    (directory / marker).unlink(missing_ok=True)
    sync_folder(directory)
    new = {path.name for path in staged.iterdir()}
    for path in [path for pattern in stale for path in directory.glob(pattern) if path.name not in new]:
        path.unlink()
    for name in sorted(new - {marker}):
        if (directory / name).is_dir(): shutil.rmtree(directory / name)
        os.rename(staged / name, directory / name)
    sync_folder(directory)
    os.rename(staged / marker, directory / marker)
    sync_folder(directory)


@dataclass(frozen=True)
class Source:
    """A tensor to be written: dtype by the name in `DTYPES`, and `chunks()`, its bytes in index order."""
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Chunks]

    @property
    def nbytes(self) -> int: return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Placed:
    """A tensor of a file: dtype by the name in `DTYPES`, and its first byte."""
    dtype: str
    shape: tuple[int, ...]
    offset: int


def shards(sources: Mapping[str, Source], limit: int) -> list[dict[str, Source]]:
    """The tensors of each file, in order, at most `limit` bytes together. A tensor is never split: a larger
    one has a file of its own."""
    made: list[dict[str, Source]] = [{}]
    size = 0
    for name, source in sources.items():
        if made[-1] and size + source.nbytes > limit:
            made.append({})
            size = 0
        made[-1][name] = source
        size += source.nbytes
    return made


def write_tensors(path: Path, sources: Mapping[str, Source]) -> tuple[FileRecord, dict[str, Placed]]:
    """Writes a file of these tensors: its record, and where they are. Raises OSError."""
    ordered = sorted(sources.items(), key=lambda each: -ITEM_BYTES[each[1].dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, begins = 0, dict[str, int]()
    for name, source in ordered:
        entries[name] = {"dtype": source.dtype, "shape": list(source.shape),
                         "data_offsets": [offset, offset + source.nbytes]}
        begins[name] = offset
        offset += source.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    def chunks() -> Iterator[bytes | bytearray | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _, source in ordered: yield from source.chunks()
    record, first = write_file(path, chunks()), 8 + len(text)
    assert record.nbytes == first + offset, "sources have as many bytes as their shapes say"
    return record, {name: Placed(sources[name].dtype, sources[name].shape, first + begin)
                    for name, begin in begins.items()}
