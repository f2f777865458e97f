"""The file of one layer of repacked weights: buffers, and what they are.

Protocol: `write(file, key, parts, data)` writes the parts of a layer. `describe(path, key)` gives what a
file says of them, `empty` a part with buffers that have no memory yet, `read` fills them. A damaged file
raises one of `DAMAGES`.

All buffers one after the other, as they lie in memory; JSON: of each part its type, shape, flags, and a
CRC-32 of each buffer; a footer: `MAGIC`, the length of the JSON, its hash with the key, which is a secret.
The length of a file follows from types and shapes. A CRC costs as much as reading from the page cache (2 GB/s
of a core); files are not synced when they are written, so it is what finds blocks that a crash of the system
left out. Buffers have no keyed hash, which costs twice as much: no byte of a weight is code.
"""
from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any
from zlib import crc32

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv import private
from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant import sparse
from tinygrad_nv.quant.activations import QWeight, SparseWeight, StackWeight
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import QTensor, in_memory
from tinygrad_nv.quant.types import Buffer, QType, buffers, stack_buffers
from tinygrad_nv.runtime import memory
from tinygrad_nv.tile.spec_json import from_plain, to_plain

from .layers import Part

CHUNK = 1 << 20             # bytes that are copied and summed at a time: they stay in a core's cache
MAGIC, FOOTER = b"repacked", struct.Struct("<8sI32s")
DAMAGES = (OSError, ValueError, LookupError, TypeError, AttributeError, SpecError)


def tensors_of(part: Part) -> dict[str, Tensor]:
    """Buffers that a file has of a part, by name."""
    if isinstance(part, Tensor): return {}
    if isinstance(part, QWeight | StackWeight): return dict(part.matrix.buffers)
    matrix = part.matrix
    scales = {} if matrix.scales is None else {"scales": matrix.scales}
    return {"values": matrix.values, "metadata": matrix.metadata, **scales}


def _describe_part(part: Part, sums: Mapping[str, int]) -> dict[str, Any]:
    """A part without its buffers, of which it has checksums; {} of a dense one."""
    if isinstance(part, Tensor): return {}
    made = {"shape": list(part.matrix.shape), "activations": to_plain(part.activations), "sums": dict(sums)}
    if isinstance(part, StackWeight): return {"stack": to_plain(part.matrix.type), "int8": part.int8, **made}
    made["input_scale"] = part.input_scale
    if isinstance(part, SparseWeight): return {"sparse": to_plain(part.matrix.dtype), **made}
    return {"type": to_plain(part.matrix.type), "int8": part.int8, "codes": part.codes, **made}


def empty(data: dict[str, Any], plain: list[Tensor], device: str | None) -> Part:
    """A part with empty buffers; a dense one is taken from `plain`."""
    if not data: return plain.pop(0)
    how = from_plain(Activations | None, data["activations"])

    def make(wanted: Mapping[str, Buffer]) -> dict[str, Tensor]:
        return {name: Tensor.empty(*wanted[name].shape, dtype=in_memory(wanted[name].dtype), device=device)
                for name in data["sums"]}
    if "stack" in data:
        kind: QType = from_plain(QType, data["stack"])
        extents: tuple[int, int, int] = from_plain(tuple[int, int, int], data["shape"])
        return StackWeight(QStack(kind, extents, make(stack_buffers(kind, extents))), how,
                           from_plain(bool, data["int8"]))
    shape: tuple[int, int] = from_plain(tuple[int, int], data["shape"])
    scale = from_plain(float | None, data["input_scale"])
    if "sparse" in data:
        dtype = from_plain(DType, data["sparse"])
        wanted = sparse.buffers(dtype, *shape) | {"scales": Buffer((shape[0], 1), dtypes.float32)}
        return SparseWeight(SparseTensor(dtype, shape, **make(wanted)), how, scale)
    type: QType = from_plain(QType, data["type"])
    return QWeight(QTensor(type, shape, make(buffers(type, *shape))), how, scale,
                   int8=from_plain(bool, data["int8"]), codes=from_plain(bool, data["codes"]))


def bytes_of(tensor: Tensor) -> memoryview:
    """A buffer, in the tensor's own memory where the host can address it."""
    view = memory.host_bytes(tensor)
    return memoryview(memory.read_part(tensor, 0, int(tensor.nbytes()))) if view is None else view


def write(file: FileIO, key: str, parts: Sequence[Part], data: list[dict[str, memoryview]]) -> None:
    """Writes a layer; `parts` keep the memory of `data`."""
    sums = [{name: _copy_out(view, file) for name, view in each.items()} for each in data]
    described = [_describe_part(part, each) for part, each in zip(parts, sums, strict=True)]
    text = json.dumps({"parts": described}).encode()
    _put(file, memoryview(text + FOOTER.pack(MAGIC, len(text), _hash(key, text))))


def _hash(key: str, text: bytes) -> bytes:
    return private.seal(hashlib.sha256(key.encode()).digest(), "", text)


def _copy_out(data: memoryview, file: FileIO) -> int:
    """Writes a buffer; its checksum."""
    total = 0
    for begin in range(0, len(data), CHUNK):
        total = crc32(chunk := data[begin:begin + CHUNK], total)
        _put(file, chunk)
    return total


def _put(file: FileIO, data: memoryview) -> None:
    done = 0
    while done < len(data): done += file.write(data[done:])


def describe(path: Path, key: str) -> tuple[list[dict[str, Any]], int]:
    """Returns what a file says of its parts, and the bytes of their buffers. Raises ValueError of a damaged
    one."""
    with private.open_private(path) as file:
        size = file.seek(0, os.SEEK_END) - FOOTER.size
        file.seek(max(size, 0))
        footer = file.read(FOOTER.size)
        magic, length, found = FOOTER.unpack(footer) if len(footer) == FOOTER.size else (b"", 0, b"")
        if magic != MAGIC or length > size: raise ValueError("its end is missing")
        file.seek(size - length)
        text = file.read(length)
    if not hmac.compare_digest(_hash(key, text), found):
        raise ValueError("it is of other weights, or its description was changed")
    return list(json.loads(text)["parts"]), size - length


def read(path: Path, tensors: list[Tensor], sums: list[int]) -> None:
    """Reads buffers into place. Raises ValueError where one has another checksum."""
    with private.open_private(path) as file:
        for tensor, wanted in zip(tensors, sums, strict=True):
            if _copy_in(file, tensor) != wanted: raise ValueError("a buffer has another checksum")


def _copy_in(file: BufferedReader, tensor: Tensor) -> int:
    """Fills a buffer; its checksum."""
    view, size, total = memory.host_bytes(tensor), int(tensor.nbytes()), 0
    staged = memoryview(bytearray(CHUNK if view is None else 0))
    for begin in range(0, size, CHUNK):
        count = min(CHUNK, size - begin)
        chunk = staged[:count] if view is None else view[begin:begin + count]
        done = 0
        while done < count:
            if not (more := file.readinto(chunk[done:])): raise ValueError("it ends early")
            done += more
        total = crc32(chunk, total)
        if view is None: memory.write(tensor, begin, chunk)
    return total
