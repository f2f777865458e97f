"""DLPack's structs, read and changed inside the capsules of other libraries.

Protocol: `describe(capsule)` is the tensor that a capsule holds; its memory is good while the capsule lives,
which gives it back when it goes, as one that was never taken does. `redescribe` states another dtype and
device in a capsule: numpy has no bfloat16 and no GPU, but frees its memory at any time in any thread.

Source: github.com/dmlc/dlpack, dlpack.h, version 1.1.
"""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import DLPackError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags

# DLDataTypeCode and bits; a bool of DLPack has 8
CODES: dict[DType, tuple[int, int]] = {
    **{dtype: (0, dtype.bitsize) for dtype in dtypes.sints},
    **{dtype: (1, dtype.bitsize) for dtype in dtypes.uints},
    dtypes.float16: (2, 16), dtypes.float32: (2, 32), dtypes.float64: (2, 64), dtypes.bfloat16: (4, 16),
    dtypes.bool: (6, 8), dtypes.fp8e4m3: (10, 8), dtypes.fp8e4m3fnuz: (11, 8), dtypes.fp8e5m2: (12, 8),
    dtypes.fp8e5m2fnuz: (13, 8)}
DTYPES = {code: dtype for dtype, code in CODES.items()}
NAMES = {3: "an opaque type", 5: "complex"}


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor)]


@dataclass(frozen=True)
class Described:
    """A tensor of another library: `address` of its first element, strides in elements, and what keeps the
    memory."""
    address: int
    device: tuple[int, int]
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool
    owner: object

    @property
    def size(self) -> int: return prod(self.shape)


def describe(capsule: object) -> Described:
    """Describes the tensor that a capsule holds."""
    tensor, flags = _tensor(capsule)
    shape = tuple(tensor.shape[:tensor.ndim])
    if (dtype := DTYPES.get((tensor.code, tensor.bits))) is None or tensor.lanes != 1:
        name = NAMES.get(tensor.code, f"type code {tensor.code}")
        raise DLPackError(f"elements of {name}, {tensor.bits} bits, {tensor.lanes} a vector",
                          "bool, integers and floats that tinygrad has",
                          "convert it before, or view it as bytes")
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else _dense(shape)
    return Described(tensor.data + tensor.byte_offset, (tensor.device_type, tensor.device_id), dtype, shape,
                     strides, bool(flags & READ_ONLY), capsule)


def redescribe(capsule: object, dtype: DType, device: tuple[int, int]) -> None:
    """States another dtype of the same size, and another device, in a capsule that is not taken yet."""
    tensor, _ = _tensor(capsule)
    tensor.code, tensor.bits = CODES[dtype]
    tensor.device_type, tensor.device_id = device


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1:]) for i in range(len(shape)))


def _tensor(capsule: object) -> tuple[DLTensor, int]:
    """The struct in a capsule, and its flags."""
    if (address := _pointer(capsule, b"dltensor_versioned")) is not None:
        versioned = Versioned.from_address(address)
        if versioned.major == 1: return versioned.tensor, versioned.flags
        raise DLPackError(f"DLPack {versioned.major}.{versioned.minor}", "version 1")
    if (address := _pointer(capsule, b"dltensor")) is not None: return DLTensor.from_address(address), 0
    raise DLPackError(f"__dlpack__ returned {type(capsule).__name__}",
                      "a capsule named dltensor, not taken yet")


def _pointer(capsule: object, name: bytes) -> int | None:
    api: Any = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    if not api.PyCapsule_IsValid(capsule, name): return None
    return int(api.PyCapsule_GetPointer(capsule, name))
