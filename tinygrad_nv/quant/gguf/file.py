"""The header of a GGUF file, versions 2 and 3: metadata, and where its tensors lie.

Protocol: `open_file(path)` reads and checks all of it; `file.raw(name)` is a tensor's bytes in the mapped
file, uint8 [rows, bytes of a row] (blocks.py). Every length and count is compared with what is left of the
file before anything of that size is made. `open_gguf` opens the other parts of a model, too:
llama.cpp's gguf-split writes a model in several files, whose names end in -00001-of-00003.gguf. Each has
split.no, from 0, and split.count; the first has the other metadata, too. Tensors are in any of them.

    "GGUF", u32 version, u64 tensors, u64 entries, entries, tensors, padding to a multiple of
    general.alignment (32), data

An entry is a string, its key, u32 the kind of its value, and the value; a tensor is a string, u32 the number
of extents, u64 extents (the innermost first), u32 type, u64 offset in the data. A string is u64 its length,
and UTF-8. An array is u32 the kind of its values, u64 their number, and they. All little-endian.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.files import regular_size
from tinygrad_nv.quant.gguf.blocks import FORMATS, NAMES, Format

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
# NumPy's dtypes of the kinds of values; the others are strings and arrays
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
           11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
MOST_EXTENTS, DEEPEST = 4, 4    # of a tensor, as in ggml; of arrays in arrays
MAX_VALUES = 4_000_000          # limit: values of a GGUF file's arrays; the largest have 1.3 million
MAX_METADATA_BYTES = 128 << 20  # limit: bytes of a GGUF file in front of its data; the largest have 30 MB
MAX_ENTRIES = 10_000            # limit: entries of a GGUF file's metadata
MAX_TENSORS = 100_000           # limit: tensors of a GGUF file
MAX_ARRAYS = 10_000             # limit: arrays that are values of a GGUF file's arrays
MAX_NAME = 1024                 # limit: characters of the name of a GGUF file's tensor; ggml has 63
AGAIN = "download the file again"
NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor: `shape` has the outermost extent first, `offset` counts from the start of the file `path`."""
    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int
    path: Path

    @property
    def rows(self) -> int:
        """Number of rows of `shape[-1]` elements."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """In the file."""
        return self.rows * self.format.row_bytes(self.shape[-1])


@dataclass(frozen=True)
class GGUFFile:
    """A model's files, mapped: `data` by their paths. `path` and the metadata are those of the first."""
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    data: Mapping[Path, np.ndarray] = field(repr=False)

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [rows, bytes of a row]. Pages are read as they are touched."""
        return self.bytes_of(self.tensors[name])

    def bytes_of(self, tensor: GGUFTensor) -> np.ndarray:
        """Returns the bytes of a tensor, or of some of its matrices."""
        whole = self.data[tensor.path][tensor.offset:tensor.offset + tensor.nbytes]
        return whole.reshape(tensor.rows, tensor.format.row_bytes(tensor.shape[-1]))


def open_file(path: Path) -> GGUFFile:
    """The file at `path` alone. Raises `WeightError` if it is damaged, or of a kind that is not read."""
    try:
        size = regular_size(path)
        data = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
                          "a readable file", "check its permissions") from error
    header = _Header(path, data.view(np.ndarray))
    tensors, entries = header.start()
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = header.string()
        if key in metadata: raise header.damage(f"{key[:200]} is there twice")
        metadata[key] = header.value(header.number("<u4"), 0)
    listed = [header.tensor() for _ in range(tensors)]
    return GGUFFile(path, metadata, _place(header, metadata, listed), {path: header.data})


def _place(header: _Header, metadata: Mapping[str, Any],
            listed: list[tuple[str, Format, tuple[int, ...], int]]) -> dict[str, GGUFTensor]:
    """Tensors by name, each inside the file."""
    align = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise header.damage(f"general.alignment is {align!r:.60}, no power of two")
    start, size = -(-header.at // align) * align, len(header.data)
    made: dict[str, GGUFTensor] = {}
    for name, format, shape, offset in listed:
        tensor = GGUFTensor(name, format, shape, start + offset, header.path)
        if name in made: raise header.damage(f"tensor {name} is there twice")
        if offset % align: raise header.damage(f"tensor {name} is at {offset}, no multiple of {align}")
        if tensor.offset + tensor.nbytes > size:
            raise header.damage(f"tensor {name} ends at byte {tensor.offset + tensor.nbytes}, the file at "
                                 f"{size} (truncated?)")
        made[name] = tensor
    return made


@dataclass
class _Header:
    """The rest of a file from byte `at` on."""
    path: Path
    data: np.ndarray
    at: int = 0
    values: int = 0     # so far, of arrays
    arrays: int = 0     # so far, in arrays

    def damage(self, what: str) -> WeightError:
        return WeightError(f"{self.path} is damaged: {what}", "a complete GGUF file", AGAIN)

    def too_much(self, what: str, count: int, most: int) -> WeightError:
        return WeightError(f"{self.path} has {count} {what}", f"at most {most}",
                           "use a file as it was published")

    def take(self, count: int, what: str) -> np.ndarray:
        """The next `count` bytes."""
        left = len(self.data) - self.at
        if count > left:
            raise self.damage(f"{what} at byte {self.at} needs {count} bytes, and {left} are left")
        self.at += count
        if self.at > MAX_METADATA_BYTES: raise self.too_much("bytes of metadata", self.at, MAX_METADATA_BYTES)
        return self.data[self.at - count:self.at]

    def number(self, dtype: str) -> Any:
        size = np.dtype(dtype).itemsize
        return self.take(size, "a number").view(dtype)[0].item()

    def count(self, least: int, what: str) -> int:
        """A number of things that have `least` bytes or more."""
        found = int(self.number("<u8"))
        if found * least > len(self.data) - self.at:
            raise self.damage(f"it has {found} {what}, and {len(self.data) - self.at} bytes are left")
        return found

    def few(self, count: int) -> int:
        """A number of values of an array, if there are not too many."""
        self.values += count
        if self.values > MAX_VALUES: raise self.too_much("values of arrays", self.values, MAX_VALUES)
        return count

    def string(self) -> str:
        raw = self.take(self.count(1, "bytes of a string"), "a string")
        try: return raw.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damage(f"a string that ends at byte {self.at} is not UTF-8: {error}") from error

    def strings(self, count: int) -> list[str]:
        """An array of them. Vocabularies have hundreds of thousands: as few calls for each as can be."""
        data, at, made = self.data.data, self.at, list[str]()
        size = min(len(data), MAX_METADATA_BYTES)
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > size: break
            try: made.append(str(data[begin:at], "utf-8"))
            except UnicodeDecodeError: break
        if len(made) < count:   # once more, for the message
            return [self.string() for _ in range(count)]
        self.at = at
        return made

    def start(self) -> tuple[int, int]:
        """The number of tensors, and of entries."""
        first = self.data[:4].tobytes()
        if first != MAGIC:
            raise WeightError(f"{self.path} starts with {first!r}",
                              f"a GGUF file, which starts with {MAGIC!r}", AGAIN)
        self.at = 4
        version = self.number("<u4")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            found = f"big-endian, version {swapped}" if swapped in VERSIONS else f"version {version}"
            raise WeightError(f"{self.path} is a GGUF file of {found}",
                              f"version {' or '.join(map(str, VERSIONS))}, little-endian",
                              "convert the model again with llama.cpp")
        tensors, entries = self.count(24, "tensors"), self.count(12, "entries")
        if tensors > MAX_TENSORS: raise self.too_much("tensors", tensors, MAX_TENSORS)
        if entries > MAX_ENTRIES: raise self.too_much("entries", entries, MAX_ENTRIES)
        return tensors, entries

    def value(self, kind: int, depth: int) -> Any:
        """A value of metadata: a number, a string, or a list."""
        if kind == STRING: return self.string()
        if kind in NUMBERS: return self.number(NUMBERS[kind])
        if kind != ARRAY: raise self.damage(f"a value at byte {self.at} is of kind {kind}")
        if depth == DEEPEST: raise self.damage(f"arrays at byte {self.at} are {depth} deep")
        kind = self.number("<u4")
        if kind in NUMBERS:
            size = np.dtype(NUMBERS[kind]).itemsize
            number = self.few(self.count(size, "numbers of an array"))
            return self.take(size * number, "an array").view(NUMBERS[kind]).tolist()
        count = self.few(self.count(8, "values of an array"))
        if kind == ARRAY:
            self.arrays += count
            if self.arrays > MAX_ARRAYS: raise self.too_much("arrays in arrays", self.arrays, MAX_ARRAYS)
        return self.strings(count) if kind == STRING else [self.value(kind, depth + 1) for _ in range(count)]

    def tensor(self) -> tuple[str, Format, tuple[int, ...], int]:
        if len(name := self.string()) > MAX_NAME:
            raise self.damage(f"a tensor's name has {len(name)} characters, more than {MAX_NAME}")
        extents = self.number("<u4")
        if not 0 < extents <= MOST_EXTENTS: raise self.damage(f"tensor {name} has {extents} extents")
        shape = tuple(self.take(8 * extents, "extents").view("<u8").tolist())[::-1]
        kind, offset = self.number("<u4"), self.number("<u8")
        if kind not in FORMATS:
            raise WeightError(f"{self.path}: tensor {name} is of type {NAMES.get(kind, kind)}",
                              f"one of {', '.join(each.name for each in FORMATS.values())}",
                              "use a file of the model with another quantisation")
        format = FORMATS[kind]
        if shape[-1] % format.columns:
            raise self.damage(f"tensor {name} has rows of {shape[-1]} in {format.name}, whose blocks have "
                               f"{format.columns}")
        return name, format, shape, offset


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is one of, in order, whether they are there or not."""
    if (found := NAME.fullmatch(path.name)) is None: return [path]
    stem, count, end = found[1], int(found[3]), path.name[-len(".gguf"):]
    return [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}{end}") for i in range(count)] or [path]


def open_gguf(path: Path) -> GGUFFile:
    """The model of the file at `path`, which may be any of its parts. Raises `WeightError` for one that is
    damaged or missing, or of a kind that is not read."""
    file = open_file(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1): return file
    paths = parts_of(path)
    if len(paths) != count:
        raise WeightError(f"{path} is one of {count} files of a model",
                          f"a name that ends in -00001-of-{count:05}.gguf, and the others beside it"
                          if isinstance(count, int) else "a number in split.count",
                          "give the files the names they were published with, or merge them with "
                          "llama-gguf-split --merge")
    if missing := [each.name for each in paths if not each.is_file()]:
        raise WeightError(f"{path.parent} lacks {len(missing)} of the {count} files of {paths[0].name}: "
                          f"{', '.join(missing[:8])}", "every part of the model, in one directory",
                          "download the missing files")
    opened = [open_file(each) for each in paths]
    first, tensors = opened[0], dict(opened[0].tensors)
    for i, part in enumerate(opened):
        number = part.metadata.get("split.no"), part.metadata.get("split.count")
        if number != (i, count):
            raise WeightError(f"{part.path} has split.no {number[0]!r} and split.count {number[1]!r}",
                              f"{i} and {count}, as its name says", "download the file again")
        if i and (twice := tensors.keys() & part.tensors.keys()):
            raise WeightError(f"{part.path}: tensor {min(twice)} is in another part, too", "each tensor once",
                              "download the files again")
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise WeightError(f"the {count} files of {first.path.name} have {len(tensors)} tensors",
                          f"{total}, as split.tensors.count says", "download the files again")
    data = {each: mapped for part in opened for each, mapped in part.data.items()}
    return replace(first, tensors=tensors, data=data)
