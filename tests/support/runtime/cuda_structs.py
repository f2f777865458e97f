"""The C layouts (cuda.h) that the fake driver reads what it is given through."""
from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, ClassVar

SHAPE = [(f"{what}Dim{axis}", c_uint) for what in ("grid", "block") for axis in "XYZ"]


class LaunchConfig(Structure):
    _fields_: ClassVar[Any] = [*SHAPE, ("sharedMemBytes", c_uint), ("hStream", c_uint64),
                               ("attrs", c_uint64), ("numAttrs", c_uint)]


class Window(Structure):
    _fields_: ClassVar[Any] = [("base_ptr", c_uint64), ("num_bytes", c_size_t), ("hitRatio", c_float),
                               ("hitProp", c_int), ("missProp", c_int)]


class LaunchValue(ctypes.Union):
    _fields_: ClassVar[Any] = [("window", Window), ("cluster", c_uint * 3), ("number", c_int),
                               ("pad", c_uint64 * 8)]


class LaunchAttribute(Structure):
    _fields_: ClassVar[Any] = [("id", c_int), ("pad", c_int), ("value", LaunchValue)]


class KernelNode(Structure):
    _fields_: ClassVar[Any] = [("func", c_uint64), *SHAPE, ("sharedMemBytes", c_uint),
                               ("kernelParams", c_uint64), ("extra", c_uint64), ("kern", c_uint64),
                               ("ctx", c_uint64)]


class MemsetNode(Structure):
    _fields_: ClassVar[Any] = [("dst", c_uint64), ("pitch", c_size_t), ("value", c_uint),
                               ("elementSize", c_uint), ("width", c_size_t), ("height", c_size_t)]


def _end(name: str) -> list[tuple[str, Any]]:
    return [*((f"{name}{axis}", c_size_t) for axis in ("XInBytes", "Y", "Z", "LOD")),
            (f"{name}MemoryType", c_int), (f"{name}Host", c_uint64), (f"{name}Device", c_uint64),
            (f"{name}Array", c_uint64), (f"{name}Reserved", c_uint64), (f"{name}Pitch", c_size_t),
            (f"{name}Height", c_size_t)]


class Memcpy3D(Structure):
    _fields_: ClassVar[Any] = [*_end("src"), *_end("dst"), ("WidthInBytes", c_size_t), ("Height", c_size_t),
                               ("Depth", c_size_t)]


class EdgeData(Structure):
    _fields_: ClassVar[Any] = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte),
                               ("reserved", c_ubyte * 5)]


class Location(Structure):
    _fields_: ClassVar[Any] = [("type", c_int), ("id", c_int)]


class PoolProps(Structure):
    _fields_: ClassVar[Any] = [("allocType", c_int), ("handleTypes", c_int), ("location", Location),
                               ("win32", c_void_p), ("maxSize", c_size_t), ("usage", c_ushort)]


class AccessDesc(Structure):
    _fields_: ClassVar[Any] = [("location", Location), ("flags", c_int)]


def read(kind: Any, given: Any) -> Any:
    """A copy of the C struct inside an object of cuda.bindings."""
    return kind.from_buffer_copy(ctypes.string_at(given.getPtr(), ctypes.sizeof(kind)))


def parameters(array: int, sizes: list[tuple[int, int]]) -> tuple[bytes, ...]:
    """Arguments as the driver takes them: the array points to each; `sizes` are bytes and alignment."""
    assert array or not sizes, "kernelParams is NULL for a kernel with parameters"
    out = []
    for i, (nbytes, align) in enumerate(sizes):
        place = c_uint64.from_address(array + 8 * i).value
        assert place, f"argument {i} is NULL"
        assert place % align == 0, f"argument {i} at {place:#x} is not aligned to {align}"
        out.append(ctypes.string_at(place, nbytes))
    return tuple(out)
