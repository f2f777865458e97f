"""safetensors files whose tensors are made while they are written, split into files of a limited size.

Protocol: a `Source` says dtype and shape of a tensor, and yields its bytes when it is its turn: no more than
a chunk of it need be in memory. `shards(sources, limit)` groups sources into files, `write_tensors(path,
sources)` writes one of them, durably (files.py).

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON, data). Tensors
of wider elements come first, as in files of its own library, so that each is aligned.
"""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.models.checkpoint import ITEM_BYTES
from tinygrad_nv.train.files import FileRecord, write_file

Chunks = Iterable[bytes | bytearray | memoryview]
DTYPES: dict[DType, str] = {
    dtypes.float64: "F64", dtypes.float32: "F32", dtypes.float16: "F16", dtypes.bfloat16: "BF16",
    dtypes.fp8e4m3: "F8_E4M3", dtypes.fp8e5m2: "F8_E5M2", dtypes.int8: "I8", dtypes.uint8: "U8",
    dtypes.int16: "I16", dtypes.uint16: "U16", dtypes.int32: "I32", dtypes.uint32: "U32",
    dtypes.int64: "I64", dtypes.uint64: "U64", dtypes.bool: "BOOL"}


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
