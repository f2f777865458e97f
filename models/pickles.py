"""pytorch_model.bin: its tensors and the offsets of their bytes, without running the pickle.

Protocol: `read_entries(path)` gives name, dtype, shape and byte offset of every tensor, and the strides of
one that is not in index order (a transpose). A pickle is a program that calls functions by name, so
`_Unpickler` accepts only the few names of a state dict; its own versions of them only record the arguments.

Format: a zip of torch.save since 1.6, members stored without compression. `*/data.pkl` is the state dict, in
which a storage is the persistent id ("storage", type, key, device, elements); `*/data/<key>` are its bytes.
"""
from __future__ import annotations

import collections
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tinygrad_nv.errors import WeightError

STORAGES = {"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CONVERT = "convert it to safetensors"


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


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...],
            *_: Any) -> _Tensor:
    numbers = (offset, *shape, *strides)
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or len(shape) != len(strides):
        raise pickle.UnpicklingError(f"a tensor has offset {offset}, shape {shape} and strides {strides}")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(data: _Tensor, *_: Any) -> _Tensor: return data


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"): return STORAGES.get(name, name)
        known = {("collections", "OrderedDict"): collections.OrderedDict,
                 ("torch._utils", "_rebuild_tensor_v2"): _tensor,
                 ("torch._utils", "_rebuild_parameter"): _parameter}
        if (module, name) not in known: raise pickle.UnpicklingError(f"it calls {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(str(dtype), str(key))


Listed = tuple[str, str, tuple[int, ...], int, tuple[int, ...] | None]


def read_entries(path: Path, ignored: tuple[str, ...]) -> list[Listed]:
    """Every tensor whose name does not end in one of `ignored`. Raises `WeightError`."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            state = _Unpickler(archive.open(members["data.pkl"])).load()
            return _listed(path, file, state, members, ignored)
    except (WeightError, OSError): raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise WeightError(f"{path} cannot be unpickled: {error!r}",
                          "a state dict written by torch.save since torch 1.6",
                          f"download the file again, or {CONVERT}") from error


def _listed(path: Path, file: BinaryIO, state: Any, members: Mapping[str, zipfile.ZipInfo],
            ignored: tuple[str, ...]) -> list[Listed]:
    if not isinstance(state, dict):
        raise WeightError(f"{path} holds a {type(state).__name__}", "a state dict, tensors by name", CONVERT)
    out = []
    for name, tensor in state.items():
        if str(name).endswith(ignored): continue
        if not isinstance(tensor, _Tensor) or tensor.storage.dtype not in ITEM_BYTES:
            raise WeightError(f"{path}: {name} is not a float32, float16 or bfloat16 tensor",
                              "a state dict of such tensors", CONVERT)
        member, item = members[f"data/{tensor.storage.key}"], ITEM_BYTES[tensor.storage.dtype]
        begin, nbytes = tensor.offset * item, tensor.span * item
        if member.compress_type != zipfile.ZIP_STORED or begin + nbytes > member.file_size:
            raise WeightError(f"{path} is damaged: {name} needs {nbytes} bytes at {begin} of "
                              f"{member.filename}, which has {member.file_size}", "a complete state dict",
                              "download the file again")
        position = _data_position(file, member) + begin
        strides = None if tensor.contiguous else tensor.strides
        out.append((str(name), tensor.storage.dtype, tensor.shape, position, strides))
    return out


def _data_position(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes: after a header of 30 bytes, its name, and padding that only this header
    specifies."""
    file.seek(member.header_offset)
    header = file.read(30)
    name, padding = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return member.header_offset + 30 + name + padding
