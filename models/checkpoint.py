"""The weight files of a Hugging Face directory: model.safetensors, its sharded index, or pytorch_model.bin.

Protocol: `open_checkpoint(directory)` reads headers only and lists every tensor as an `Entry`; `read_into` moves a run
of its elements from the file to a device tensor, several at once from different threads where `parallel`. A
safetensors file is checked whole when opened (header inside the file, offsets inside the data, sizes equal to
dtype × shape), so a truncated download is refused before anything runs.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON, data).
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import WeightError
from tinygrad_nv.runtime.memory import host_bytes, write

from .config import read_json

MAX_HEADER = 100 << 20  # the format's own limit
SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint. `place` orders tensors as they lie on disk; `dtype` is a name in `ITEM_BYTES`."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    place: tuple[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Checkpoint(Protocol):
    """A checkpoint whose headers have been read."""
    entries: dict[str, Entry]
    parallel: bool

    def read_into(self, entry: Entry, begin: int, end: int, tensor: Tensor, offset: int) -> None:
        """Writes elements [begin, end) of the entry, in the tensor's dtype, from byte `offset` of its memory on."""


@dataclass
class Safetensors:
    """Tensors of one or more safetensors files."""
    entries: dict[str, Entry] = field(default_factory=dict)
    parallel: bool = True

    def add(self, path: Path, only: set[str] | None = None) -> None:
        """Lists the tensors of `path`; with `only`, at least these must be there."""
        found = {entry.name: entry for entry in read_header(path)}
        if only is not None and (absent := sorted(only - set(found))):
            raise WeightError(f"{path} lacks tensors its index promises: {', '.join(absent[:8])}",
                              "the shards the index was written with", "download the directory again")
        self.entries |= found

    def read_into(self, entry: Entry, begin: int, end: int, tensor: Tensor, offset: int) -> None:
        item, (path, position) = ITEM_BYTES[entry.dtype], entry.place
        target = host_bytes(tensor)
        with open(path, "rb", buffering=0) as file:
            file.seek(position + begin * item)
            if target is not None and named(entry.dtype) == tensor.dtype:
                _fill(file, target[offset:offset + (end - begin) * item], path)
                return
            data = memoryview(bytearray((end - begin) * item))
            _fill(file, data, path)
        write(tensor, offset, convert(data, entry.dtype, tensor.dtype))


def _fill(file: FileIO, target: memoryview, path: str) -> None:
    done = 0
    while done < len(target):
        if not (count := file.readinto(target[done:])):
            raise WeightError(f"{path} ended {len(target) - done} bytes early", "the file its header describes",
                              "download the file again")
        done += count


def read_header(path: Path) -> list[Entry]:
    """The tensors a safetensors file describes, checked against its size."""
    def damaged(what: str) -> WeightError:
        return WeightError(f"{path} is damaged: {what}", "a complete safetensors file", "download the file again")
    size = path.stat().st_size
    if size < 8: raise damaged(f"{size} bytes long")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER):
            raise damaged(f"its header of {length} bytes does not fit in {size} bytes")
        text = file.read(length)
    try: header = json.loads(text)
    except ValueError as error: raise damaged(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict): raise damaged("its header is not an object")
    out = []
    for name, info in header.items():
        if name == "__metadata__": continue
        try: dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        except (KeyError, TypeError, ValueError) as error: raise damaged(f"tensor {name} has no layout") from error
        if dtype not in SAFETENSORS_DTYPES:
            raise WeightError(f"{path}: tensor {name} has dtype {dtype}", f"one of {', '.join(SAFETENSORS_DTYPES)}",
                              "convert the weights to one of these")
        entry = Entry(name, SAFETENSORS_DTYPES[dtype], shape, (str(path), 8 + length + begin))
        if end - begin != entry.nbytes: raise damaged(f"tensor {name} has {end - begin} bytes, needs {entry.nbytes}")
        if 8 + length + end > size:
            raise damaged(f"tensor {name} ends at byte {8 + length + end}, the file at {size} (truncated?)")
        out.append(entry)
    return out


def named(dtype: str) -> DType:
    """tinygrad's dtype of a name in `ITEM_BYTES`."""
    return {"float32": dtypes.float32, "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}[dtype]


def convert(data: memoryview, source: str, target: DType) -> memoryview:
    """Elements of dtype name `source` as elements of `target`, rounded to nearest even."""
    if named(source) == target: return data
    values = (widen_bfloat16(np.frombuffer(data, np.uint16)) if source == "bfloat16"
              else np.frombuffer(data, source).astype(np.float32))
    if target == dtypes.bfloat16: return memoryview(narrow_bfloat16(values)).cast("B")
    with np.errstate(over="ignore"):  # float16 overflows to inf, as torch's cast does
        return memoryview(values.astype(np.float16 if target == dtypes.float16 else np.float32)).cast("B")


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 bit patterns (uint16), to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@dataclass
class PyTorchFiles:
    """Tensors of pytorch_model.bin files, unpickled by tinygrad (which runs no code from the pickle)."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    parallel: bool = False  # tinygrad's scheduler is not for several threads

    def add(self, path: Path) -> None:
        """Lists the tensors of one file."""
        from tinygrad.nn.state import torch_load
        try: loaded: dict[str, Any] = torch_load(path)
        except Exception as error:
            raise WeightError(f"{path} cannot be unpickled: {error}", "a state dict written by torch.save",
                              "download the file again, or convert it to safetensors") from error
        for name, tensor in loaded.items():
            dtype = next((n for n in ITEM_BYTES if isinstance(tensor, Tensor) and named(n) == tensor.dtype), None)
            if dtype is None:
                raise WeightError(f"{path}: {name} is not a float32, float16 or bfloat16 tensor",
                                  "a state dict of such tensors", "convert it to safetensors")
            self.tensors[name] = tensor
            self.entries[name] = Entry(name, dtype, tuple(int(s) for s in tensor.shape),
                                       (str(path), len(self.entries)))

    def read_into(self, entry: Entry, begin: int, end: int, tensor: Tensor, offset: int) -> None:
        data = host_bytes(self.tensors[entry.name].flatten()[begin:end].to("CPU").contiguous().realize())
        assert data is not None, "the CPU device is addressable"
        write(tensor, offset, convert(data, entry.dtype, tensor.dtype))


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint of `directory`, safetensors before pickles, a single file before shards.

    Raises `WeightError` when there is none, a shard is missing, or a file is damaged.
    """
    if (single := directory / "model.safetensors").is_file():
        tensors = Safetensors()
        tensors.add(single)
        return tensors
    if (index := directory / "model.safetensors.index.json").is_file():
        tensors = Safetensors()
        for path, names in _shards(index).items(): tensors.add(path, names)
        return tensors
    pickles = PyTorchFiles()
    if (single := directory / "pytorch_model.bin").is_file(): pickles.add(single)
    elif (index := directory / "pytorch_model.bin.index.json").is_file():
        for path in _shards(index): pickles.add(path)
    else:
        raise WeightError(f"{directory} holds no weights", "model.safetensors, or model.safetensors.index.json with its "
                          "shards, or pytorch_model.bin", "download the weight files into the directory")
    return pickles


def _shards(index: Path) -> dict[Path, set[str]]:
    """File → tensor names, of an index; every file must exist."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index} has no weight_map", "an object that maps tensor names to files",
                          "download the file again")
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items(): shards.setdefault(index.parent / str(file), set()).add(name)
    if missing := sorted(path.name for path in shards if not path.is_file()):
        raise WeightError(f"{index.parent} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:8])}",
                          "every file the index names", "download the missing shards")
    return shards
