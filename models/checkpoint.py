"""The weight files of a Hugging Face directory: model.safetensors, its sharded index, or pytorch_model.bin;
or a GGUF file.

Protocol: `open_checkpoint(directory)` reads headers only and lists every tensor as an `TensorEntry`;
`read_into` copies a range of its elements from the file to a device tensor, and is thread-safe. A safetensors
file is checked whole when opened (header inside the file, offsets inside the data, sizes equal to dtype ×
shape), so a truncated download is refused before anything runs.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON, data).
"""
from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.floats import narrow_bfloat16, widen_bfloat16
from tinygrad_nv.runtime.memory import host_bytes, write

from . import bitmask, config
from .config import read_json
from .pickles import ITEM_BYTES as FLOAT_BYTES
from .pickles import read_entries
from .safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, damage, read_layouts

# Older checkpoints carry buffers that are recomputed, some of them masks of bool; they mean nothing.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
EXPERT_BLOCKS = ("_blocks", "_scales")
MAX_EXPERTS = 1 << 16   # limit: experts whose blocks are one tensor
MAX_SHARDS = 10_000     # limit: weight files of a model; the largest has 200
SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# and those of quantised tensors, under their own names
NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
                "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
                "U64": "<u8", "F64": "<f8", "BOOL": "u1"}
# fewer bytes between rows of a part are read with them, as a disk reads pages of this size
SKIP = 4096
ITEM_BYTES = FLOAT_BYTES | {name: np.dtype(kind).itemsize for name, kind in NUMPY_DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint. `file_offset` (file, byte) orders tensors as they are on disk; `dtype` is a
    name in `ITEM_BYTES`, of floats tinygrad's, else that of safetensors. `strides`, in elements, are set if
    the elements are not in index order. `parts` are what a sparse tensor is stored in (bitmask.py)."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: tuple[str, int]
    strides: tuple[int, ...] | None = None
    parts: tuple[TensorEntry, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        if self.parts: return sum(part.nbytes for part in self.parts)
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Checkpoint(Protocol):
    """A checkpoint whose headers have been read."""
    entries: dict[str, TensorEntry]

    def read_into(self, entry: TensorEntry, begin: int, end: int, tensor: Tensor, offset: int) -> None:
        """Writes elements [begin, end) of the entry, in the tensor's dtype, from byte `offset` of its
        memory on."""


@dataclass
class Safetensors:
    """Tensors of one or more safetensors files."""
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    listed: int = 0     # tensors of all files, also where files have the same

    def add(self, path: Path, only: set[str] | None = None) -> None:
        """Lists the tensors of `path`; with `only`, at least these must be there."""
        try: found = {entry.name: entry for entry in self.list_file(path)}
        except OSError as error:
            raise WeightError(f"{path} cannot be read: {error.strerror}", "a readable file",
                              "check its permissions") from error
        absent = [n for n in sorted((only or set()) - set(found)) if not n.endswith(IGNORED_SUFFIXES)]
        if absent:
            raise WeightError(f"{path} lacks tensors that its index lists: {', '.join(absent[:8])}",
                              "the shards the index was written with", "download the directory again")
        self.entries |= found
        self.listed += len(found)
        if self.listed > MAX_TENSORS:
            raise WeightError(f"the files beside {path} have more than {MAX_TENSORS} tensors",
                              "the files of one model", "download the directory again")

    def list_file(self, path: Path) -> list[TensorEntry]:
        """The tensors of one file."""
        return read_header(path)

    def read_into(self, entry: TensorEntry, begin: int, end: int, tensor: Tensor, offset: int) -> None:
        if entry.parts or entry.strides is not None:
            found = (_of_larger(entry, entry.parts[0].file_offset[1], begin, end,
                                lambda first, last: _sparse_elements(entry, first, last))
                     if entry.parts else read_strided(rows_of(entry, begin, end)))
            return write(tensor, offset, convert(found, entry.dtype, tensor.dtype))
        item, (path, position) = ITEM_BYTES[entry.dtype], entry.file_offset
        target = host_bytes(tensor)
        with open(path, "rb", buffering=0) as file:
            file.seek(position + begin * item)
            if target is not None and dtype_of(entry.dtype) == tensor.dtype:
                _fill(file, target[offset:offset + (end - begin) * item], path)
                return
            data = memoryview(bytearray((end - begin) * item))
            _fill(file, data, path)
        write(tensor, offset, convert(data, entry.dtype, tensor.dtype))


def rows_of(entry: TensorEntry, begin: int, end: int) -> TensorEntry:
    """The rows of a strided entry that elements [begin, end) are, in index order."""
    assert entry.strides is not None, "entries with strides only"
    each = math.prod(entry.shape[1:])
    assert begin % each == end % each == 0, "whole rows"
    (path, offset), first = entry.file_offset, begin // each
    return replace(entry, shape=(end // each - first, *entry.shape[1:]),
                   file_offset=(path, offset + first * entry.strides[0] * ITEM_BYTES[entry.dtype]))


def is_split_by_rows(entry: TensorEntry) -> bool:
    """Whether rows of a strided entry lie one behind the other in the file."""
    assert entry.strides is not None, "entries with strides only"
    return len(entry.shape) > 1 and entry.strides[0] == max(entry.strides)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def read_strided(entry: TensorEntry) -> memoryview:
    """The elements in index order. Of the axis with the largest stride each index is read by itself, if what
    lies between is worth it."""
    assert entry.strides is not None, "entries with strides only"
    (path, offset), item, strides = entry.file_offset, ITEM_BYTES[entry.dtype], [*entry.strides]
    outer = max(range(len(strides)), key=strides.__getitem__)
    step = strides[outer]
    inner = _span(*(tuple(each for i, each in enumerate(some) if i != outer)
                    for some in (entry.shape, entry.strides)))
    count, each = entry.shape[outer], inner
    if (step - inner) * item < SKIP: count, each = 1, _span(entry.shape, entry.strides)
    else: strides[outer] = inner
    data = memoryview(bytearray(count * each * item))
    with open(path, "rb", buffering=0) as file:
        for i in range(count):
            file.seek(offset + i * step * item)
            _fill(file, data[i * each * item:(i + 1) * each * item], path)
    return in_index_order(data, replace(entry, strides=tuple(strides)))


def _of_larger(entry: TensorEntry, origin: int, begin: int, end: int,
               read: Callable[[int, int], np.ndarray]) -> memoryview:
    """Elements [begin, end) of a part of a tensor whose elements `read` gives; it is listed as though it lay
    at byte `origin`, in index order."""
    first = (entry.file_offset[1] - origin) // ITEM_BYTES[entry.dtype]
    if entry.strides is None: return _bytes_of(read(first + begin, first + end))
    part = rows_of(entry, begin, end)
    first = (part.file_offset[1] - origin) // ITEM_BYTES[entry.dtype]
    return in_index_order(_bytes_of(read(first, first + _span(part.shape, entry.strides))), part)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).data.cast("B")


def _fill(file: FileIO, target: memoryview, path: str) -> None:
    done = 0
    while done < len(target):
        if not (count := file.readinto(target[done:])):
            raise WeightError(f"{path} ended {len(target) - done} bytes early",
                              "the file its header describes",
                              "download the file again")
        done += count


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors a safetensors file describes, checked against its size."""
    start, layouts = read_layouts(path, IGNORED_SUFFIXES)
    out = []
    for name, dtype, shape, begin, end in layouts:
        if dtype not in NUMPY_DTYPES: raise dtype_error(str(path), name, dtype)
        stored = SAFETENSORS_DTYPES.get(dtype, dtype)
        entry = TensorEntry(name, stored, shape, (str(path), start + begin))
        if end - begin != entry.nbytes:
            raise damage(path, f"tensor {name[:200]} has {end - begin} bytes, needs {entry.nbytes}")
        out.append(entry)
    return out


def dtype_error(path: str, name: str, dtype: str) -> WeightError:
    """Returns the error of a tensor that is no float, where one is expected."""
    return WeightError(f"{path}: tensor {name[:200]} has dtype {dtype[:60]}",
                       f"one of {', '.join(SAFETENSORS_DTYPES)}", "convert the weights to one of these")


def safetensors_dtype(entry: TensorEntry) -> str:
    """The name that safetensors has for an entry's dtype."""
    return {full: name for name, full in SAFETENSORS_DTYPES.items()}.get(entry.dtype, entry.dtype)


def read_array(entry: TensorEntry) -> np.ndarray:
    """A whole tensor; bfloat16 and fp8 as unsigned integers of their bits. Raises `WeightError`."""
    if entry.strides is not None:
        raise WeightError(f"{entry.file_offset[0]}: {entry.name} is transposed",
                          "a quantised tensor in index order", "convert the checkpoint to safetensors")
    if entry.parts: return _sparse_elements(entry, 0, math.prod(entry.shape)).reshape(entry.shape)
    return _read(entry, 0, math.prod(entry.shape)).reshape(entry.shape)


def _read(entry: TensorEntry, begin: int, end: int) -> np.ndarray:
    """Elements [begin, end)."""
    (path, position), item = entry.file_offset, ITEM_BYTES[entry.dtype]
    data = bytearray((end - begin) * item)
    with open(path, "rb", buffering=0) as file:
        file.seek(position + begin * item)
        _fill(file, memoryview(data), path)
    return np.frombuffer(data, NUMPY_DTYPES[safetensors_dtype(entry)])


def _sparse_elements(entry: TensorEntry, begin: int, end: int) -> np.ndarray:
    """Elements [begin, end) of a sparse tensor, with the zeros that are not stored."""
    elements, mask, *offsets = entry.parts
    k, width = entry.strides[0] if entry.strides else entry.shape[1], mask.shape[1]
    first, last = begin // k, -(-end // k)
    if offsets:
        starts = [*read_array(offsets[0]).reshape(-1)[first:last + 1].tolist(), math.prod(elements.shape)]
        begins, ends = starts[0], starts[last - first]
    else: begins, ends = first * (k // 2), last * (k // 2)
    bits = _read(mask, first * width, last * width).reshape(-1, width)
    if not 0 <= begins <= ends <= math.prod(elements.shape):
        raise WeightError(f"{offsets[0].name}: rows {first} to {last} are elements {begins} to {ends}",
                          f"increasing numbers up to {math.prod(elements.shape)}",
                          "download the directory again")
    whole = bitmask.spread(entry.name, _read(elements, begins, ends), bits, k)
    return whole.reshape(-1)[begin - first * k:end - first * k]


def _with_sparse(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Entries, those of sparse tensors joined. Raises `WeightError` where parts do not fit each other."""
    out = dict(entries)
    for weight, names in bitmask.find_masked(entries).items():
        elements, mask, shape, *offsets = (out.pop(name) for name in names.values())
        few = math.prod(shape.shape) <= 8 and shape.dtype.startswith("I")
        extents = tuple(read_array(shape).reshape(-1).tolist()) if few else ()
        n, k = extents if len(extents) == 2 else (0, 0)
        count = (n,) if offsets else (n, k // 2)
        if mask.shape != (n, -(-k // 8)) or (offsets[0].shape if offsets else elements.shape) != count:
            found = ", ".join(f"{one.name} {list(one.shape)}" for one in (elements, mask, *offsets))
            raise WeightError(f"{weight} is of shape {list(extents)}, its parts are {found}",
                              f"a mask of {[n, -(-k // 8)]} and elements of {[n, k // 2]}, or row offsets",
                              "download the directory again")
        out[weight] = TensorEntry(weight, elements.dtype, extents, elements.file_offset, None,
                                  (elements, mask, *offsets))
    return out


def _with_experts(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Entries, blocks and scales of all experts as those of each (quant/readers/mxfp4.py)."""
    out: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        prefix, there, last = name.rpartition(".experts.")
        if not (there and last.endswith(EXPERT_BLOCKS) and "." not in last and entry.dtype == "U8"):
            out[name] = entry
            continue
        (count, *shape), (path, offset) = entry.shape or (0,), entry.file_offset
        if count > MAX_EXPERTS:
            raise WeightError(f"{path}: {name[:200]} has {count} experts", f"at most {MAX_EXPERTS}",
                              "download the file again")
        for i in range(count):
            own = f"{prefix}.experts.{i}.{last}"
            out[own] = replace(entry, name=own, shape=tuple(shape),
                               file_offset=(path, offset + i * math.prod(shape)))
    return out


def dtype_of(dtype: str) -> DType:
    """tinygrad's dtype of a name in `ITEM_BYTES`."""
    return {"float32": dtypes.float32, "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}[dtype]


def convert(data: memoryview, source: str, target: DType) -> memoryview:
    """Elements of dtype name `source` as elements of `target`, rounded to nearest even."""
    if dtype_of(source) == target: return data
    values = (widen_bfloat16(np.frombuffer(data, np.uint16)) if source == "bfloat16"
              else np.frombuffer(data, source).astype(np.float32, copy=False))
    if target == dtypes.bfloat16: return narrow_bfloat16(values).data.cast("B")
    with np.errstate(over="ignore"):  # float16 overflows to inf, as torch's cast does
        return values.astype(np.float16 if target == dtypes.float16 else np.float32).data.cast("B")


def in_index_order(data: memoryview, entry: TensorEntry) -> memoryview:
    """The elements of a strided view, in index order."""
    item = ITEM_BYTES[entry.dtype]
    raw = np.frombuffer(data, np.dtype(f"u{item}"))
    assert entry.strides is not None, "entries with strides only"
    view = np.lib.stride_tricks.as_strided(raw, entry.shape, tuple(stride * item for stride in entry.strides))
    return np.ascontiguousarray(view).reshape(-1).data.cast("B")


class PyTorchFiles(Safetensors):
    """Tensors of pytorch_model.bin files, which are listed differently and may be transposed."""

    def list_file(self, path: Path) -> list[TensorEntry]:
        """The tensors of one file."""
        return [TensorEntry(name, dtype, shape, (str(path), position), strides)
                for name, dtype, shape, position, strides in read_entries(path, IGNORED_SUFFIXES)]


class GGUFTensors:
    """Tensors of a GGUF file, whose format is imported with the first."""

    def __init__(self, path: Path) -> None:
        from tinygrad_nv.quant.gguf.file import open_gguf

        from . import gguf
        self.gguf = gguf
        self.file = open_gguf(path)
        self.stored = {each.name: each for each in gguf.list_tensors(self.file)}
        self.entries = {each.name: TensorEntry(each.name, each.dtype, each.shape,
                                               (str(each.source.path), each.source.offset))
                        for each in self.stored.values()}

    def read_into(self, entry: TensorEntry, begin: int, end: int, tensor: Tensor, offset: int) -> None:
        whole = self.stored[entry.name]
        found = _of_larger(entry, whole.source.offset, begin, end,
                           lambda first, last: self.gguf.elements(self.file, whole, first, last))
        write(tensor, offset, convert(found, entry.dtype, tensor.dtype))


def open_checkpoint(directory: Path, stem: str = "model") -> Checkpoint:
    """The checkpoint of `directory`, safetensors (`stem`.safetensors) before pickles, a single file before
    shards; or a GGUF file, or the one in a directory.

    Raises `WeightError` when there is none, a shard is missing, or a file is damaged.
    """
    if (file := config.find_gguf(directory)) is not None: return GGUFTensors(file)
    for kind, single in ((Safetensors, f"{stem}.safetensors"), (PyTorchFiles, "pytorch_model.bin")):
        path, index = directory / single, directory / f"{single}.index.json"
        checkpoint = kind()
        if path.is_file(): checkpoint.add(path)
        elif index.is_file():
            for shard, names in _shards(index).items(): checkpoint.add(shard, names)
        else: continue
        checkpoint.entries = _with_experts(_with_sparse(checkpoint.entries))
        return checkpoint
    raise WeightError(f"{directory} holds no weights",
                      "model.safetensors, or model.safetensors.index.json with its shards, or "
                      "pytorch_model.bin",
                      "download the weight files into the directory")


def _shards(index: Path) -> dict[Path, set[str]]:
    """File → tensor names, of an index; every file must exist."""
    weight_map = read_json(index, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index} has no weight_map", "an object that maps tensor names to files",
                          "download the file again")
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str): raise _no_name(index, name, file)
        by_file.setdefault(file, set()).add(name)
    if len(by_file) > MAX_SHARDS:
        raise WeightError(f"{index} names {len(by_file)} files", f"at most {MAX_SHARDS}",
                          "download the file again")
    for file, names in by_file.items():
        if not file or Path(file).name != file: raise _no_name(index, min(names), file)
    shards = {index.parent / file: names for file, names in by_file.items()}
    if missing := sorted(path.name for path in shards if not os.path.isfile(path)):
        listed = ", ".join(missing[:8])
        raise WeightError(f"{index.parent} lacks {len(missing)} of {len(shards)} shards: {listed}",
                          "every file the index names", "download the missing shards")
    if len({(found.st_dev, found.st_ino) for found in map(os.stat, shards)}) < len(shards):
        raise WeightError(f"{index} names a file twice, by links to it", "files of their own",
                          "download the directory again")
    return shards


def _no_name(index: Path, tensor: str, file: object) -> WeightError:
    return WeightError(f"{index}: {tensor[:200]} is in {file!r:.200}", "the name of a file beside the index",
                       "download the file again")
