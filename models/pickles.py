"""pytorch_model.bin: its tensors and the offsets of their bytes, without running the pickle.

Protocol: `read_entries(path)` gives name, dtype, shape and byte offset of every tensor, and the strides of
one that is not in index order (a transpose). A pickle is a program that calls functions by name, so
pickle_reader.py runs the few instructions of a state dict, and what stands for torch's functions only records
the arguments. Tensors are stored, not compressed, each storage has bytes of its own, and no tensor has more
elements than its storage.

Format: a zip of torch.save since 1.6, members stored without compression. `*/data.pkl` is the state dict, in
which a storage is the persistent id ("storage", type, key, device, elements); `*/data/<key>` are its bytes.
"""
from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

from tinygrad_nv.errors import WeightError

from .pickle_reader import Name, load

STORAGES = {"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CONVERT = "convert it to safetensors"
MAX_PICKLE_BYTES = 32 << 20     # limit: bytes of data.pkl in pytorch_model.bin, about 200 for a tensor
MAX_DIRECTORY_BYTES = 8 << 20   # limit: bytes of the directory of pytorch_model.bin, about 90 for a tensor
MAX_DIMENSIONS = 64             # of a tensor, as NumPy has it
LOCAL = b"PK\3\4"               # begins what stands before a file in an archive


@dataclass(frozen=True)
class _Storage:
    """`dtype` is a key of `ITEM_BYTES`, or torch's name of an unsupported storage."""
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the elements are in index order."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step: return False
            step *= extent
        return True

    @property
    def span(self) -> int:
        """Elements from the first to the last one, both included."""
        if 0 in self.shape: return 0
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))


def _call(name: str, args: tuple[Any, ...]) -> Any:
    """Returns what a function of torch would return. Raises `UnpicklingError` for any other."""
    if name == "torch._utils._rebuild_tensor_v2": return _tensor(*args[:4])
    if name != "torch._utils._rebuild_parameter": raise UnpicklingError(f"it calls {name}")
    if args and isinstance(args[0], _Tensor): return args[0]
    raise UnpicklingError("a parameter is no tensor")


def _tensor(storage: Any = None, offset: Any = None, shape: Any = None, strides: Any = None) -> _Tensor:
    numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else ()
    if not numbers or not isinstance(storage, _Storage) or len(shape) != len(strides) or \
            len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in numbers):
        raise UnpicklingError("a tensor has no shape, or negative strides")
    return _Tensor(storage, offset, shape, strides)


def _storage(pid: Any) -> _Storage:
    if not isinstance(pid, tuple) or len(pid) < 3 or not isinstance(pid[1], Name) or type(pid[2]) is not str:
        raise UnpicklingError("a storage has no key")
    module, _, name = pid[1].rpartition(".")
    if module not in ("torch", "torch.storage") or not name.endswith("Storage"):
        raise UnpicklingError(f"it calls {pid[1]}")
    return _Storage(STORAGES.get(name, name), pid[2])


class _LimitedFile(io.BufferedReader):
    """A file for zipfile, which reads a directory at once, as long as its end says."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises `UnpicklingError` for more than a directory has."""
        if size is None or size < 0: size = MAX_DIRECTORY_BYTES
        if size > MAX_DIRECTORY_BYTES:
            raise UnpicklingError(f"its directory has {size} bytes, more than {MAX_DIRECTORY_BYTES}")
        return super().read(size)


Listed = tuple[str, str, tuple[int, ...], int, tuple[int, ...] | None]


def read_entries(path: Path, ignored: tuple[str, ...]) -> list[Listed]:
    """Every tensor whose name does not end in one of `ignored`. Raises `WeightError`."""
    try:
        with _LimitedFile(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            members = _members(archive)
            state = load(_read_pickle(archive, members), _call, _storage)
            return _list_tensors(path, file, state, members, ignored)
    except (WeightError, OSError): raise
    except Exception as error:  # a damaged archive can fail in any way
        raise WeightError(f"{path} cannot be unpickled: {repr(error)[:300]}",
                          "a state dict written by torch.save since torch 1.6",
                          f"download the file again, or {CONVERT}") from error


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Files of the archive by their names below its folder."""
    made: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.partition("/")[2]
        if name in made: raise UnpicklingError(f"{name[:100]!r} is there twice")
        made[name] = info
    return made


def _read_pickle(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]) -> bytes:
    if "data.pkl" not in members: raise UnpicklingError("it has no data.pkl")
    with archive.open(members["data.pkl"]) as file:
        made = bytearray()      # the directory's size of a compressed file is not believed
        while len(made) <= MAX_PICKLE_BYTES and (chunk := file.read(1 << 20)): made += chunk
    if len(made) > MAX_PICKLE_BYTES:
        raise UnpicklingError(f"its data.pkl has more than {MAX_PICKLE_BYTES} bytes")
    return bytes(made)


def _list_tensors(path: Path, file: BinaryIO, state: Any, members: Mapping[str, zipfile.ZipInfo],
            ignored: tuple[str, ...]) -> list[Listed]:
    if not isinstance(state, dict):
        raise WeightError(f"{path} holds a {type(state).__name__}", "a state dict, tensors by name", CONVERT)
    out, places = [], dict[str, int]()
    for name, tensor in state.items():
        if str(name).endswith(ignored): continue
        if not isinstance(tensor, _Tensor) or tensor.storage.dtype not in ITEM_BYTES:
            raise WeightError(f"{path}: {name} is not a float32, float16 or bfloat16 tensor",
                              "a state dict of such tensors", CONVERT)
        key, item = f"data/{tensor.storage.key}", ITEM_BYTES[tensor.storage.dtype]
        if key not in members: raise UnpicklingError(f"it has no {key[:100]}")
        member, begin = members[key], tensor.offset * item
        nbytes = max(tensor.span, math.prod(tensor.shape)) * item
        if member.compress_type != zipfile.ZIP_STORED:
            raise WeightError(f"{path}: {member.filename[:200]} is compressed",
                              "tensors as torch.save stores them, not compressed", CONVERT)
        if begin + nbytes > member.file_size:
            raise WeightError(f"{path} is damaged: {str(name)[:200]} needs {nbytes} bytes at {begin} of "
                              f"{member.filename[:200]}, which has {member.file_size}",
                              "a complete state dict, no tensor larger than its storage",
                              "download the file again")
        if key not in places: places[key] = _data_position(file, member)
        strides = None if tensor.contiguous else tensor.strides
        out.append((str(name), tensor.storage.dtype, tensor.shape, places[key] + begin, strides))
    _require_apart(path, file, [(at, members[key]) for key, at in places.items()])
    return out


def _require_apart(path: Path, file: BinaryIO, placed: list[tuple[int, zipfile.ZipInfo]]) -> None:
    """Raises `WeightError` where storages end behind the file, or share bytes."""
    last, end = "", 0
    for at, member in sorted(placed, key=lambda each: each[0]):
        if at < end: raise _damage(path, f"{last[:200]} and {member.filename[:200]} share bytes")
        last, end = member.filename, at + member.file_size
    if end > (size := file.seek(0, os.SEEK_END)):
        raise _damage(path, f"{last[:200]} ends at byte {end}, the file at {size}")


def _damage(path: Path, what: str) -> WeightError:
    return WeightError(f"{path} is damaged: {what}", "a complete state dict", "download the file again")


def _data_position(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes: after a header of 30 bytes, its name, and padding that only this header
    specifies."""
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != LOCAL: raise UnpicklingError(f"{member.filename[:100]!r} has no header")
    name, padding = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return member.header_offset + 30 + name + padding
