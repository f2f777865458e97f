"""Tensor maps by cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col.

Protocol: the functions write to memory aligned to 64 bytes (128 from CUDA 13 on), which cuda.bindings does
not see to: its CUtensorMap lies where Python's allocator put it. So the driver gives their addresses, and
they are called on memory of ours. The emulator's limits (ptx/emulator/tensormap.py) say in words what the
driver answers with an invalid value; they are asked only then.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tinygrad_nv.errors import TensorMapError
from tinygrad_nv.runtime.cuda.context import CUDAContext
from tinygrad_nv.runtime.driver import TENSOR_MAP_BYTES, TensorMapSpec

TYPES = {"u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64",
         "f16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "bf16": "BFLOAT16", "tf32": "TFLOAT32"}
FILLS = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}
MOST_RANK = 5
HOST_ALIGN = 128
SINCE = 12000   # the release whose functions are meant
_UINTS, _INTS = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_int32)
_HEAD = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
         ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64))
_KINDS = (ctypes.c_int,) * 4
SIGNATURES = {
    "cuTensorMapEncodeTiled": ctypes.CFUNCTYPE(*_HEAD, _UINTS, _UINTS, *_KINDS),
    "cuTensorMapEncodeIm2col": ctypes.CFUNCTYPE(*_HEAD, _INTS, _INTS, ctypes.c_uint32, ctypes.c_uint32,
                                                _UINTS, *_KINDS)}


def encoder(gpu: CUDAContext, name: str) -> Any:
    """One of `SIGNATURES`."""
    address, found = gpu.call("cuGetProcAddress", name.encode(), SINCE, 0)
    if not address:
        raise TensorMapError(f"the driver has no {name} ({found.name})",
                             "a driver for CUDA 12.0 or later", "update the NVIDIA driver")
    return SIGNATURES[name](int(address))


def encode_map(gpu: CUDAContext, encode: Callable[[str], Any], spec: TensorMapSpec) -> bytes:
    """The 128 bytes of a tensor map, by the function that `encode` looks up. Raises `TensorMapError`."""
    rank, steps = len(spec.dims), spec.element_strides or (1,) * len(spec.dims)
    _check(gpu, spec, steps)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + HOST_ALIGN)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % HOST_ALIGN
    longs, words, offsets = (kind * MOST_RANK for kind in (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32))
    name, box = "cuTensorMapEncodeTiled", list[Any]([words(*spec.box)])
    if spec.lower:
        name, box = "cuTensorMapEncodeIm2col", [offsets(*spec.lower), offsets(*spec.upper), *spec.box]
    status = gpu.cu.CUresult(encode(name)(
        place, _code(gpu, "DataType", "DATA_TYPE", TYPES[spec.dtype]), rank, spec.address, longs(*spec.dims),
        longs(*spec.strides), *box, words(*steps),
        _code(gpu, "Interleave", "INTERLEAVE", spec.interleave.upper()),
        _code(gpu, "Swizzle", "SWIZZLE", spec.swizzle.upper()),
        _code(gpu, "L2promotion", "L2_PROMOTION",
              "NONE" if spec.l2_promotion == "none" else f"L2_{spec.l2_promotion}"),
        _code(gpu, "FloatOOBfill", "FLOAT_OOB_FILL", FILLS[spec.fill])))
    if status.name == "CUDA_ERROR_INVALID_VALUE": _explain(spec, steps)
    gpu.check(status, doing=f"encoding a tensor map of {spec}")
    return ctypes.string_at(place, TENSOR_MAP_BYTES)


def _code(gpu: CUDAContext, kind: str, prefix: str, name: str) -> int:
    """An enumerator by its name."""
    return int(getattr(getattr(gpu.cu, f"CUtensorMap{kind}"), f"CU_TENSOR_MAP_{prefix}_{name}"))


def _check(gpu: CUDAContext, spec: TensorMapSpec, steps: tuple[int, ...]) -> None:
    """Raises `TensorMapError` for what the C function cannot be asked: it would read past the lists."""
    if gpu.capability < (9, 0):
        raise TensorMapError(f"a tensor map on {gpu.properties.arch}", "sm_90 or later")
    if spec.dtype not in TYPES:
        raise TensorMapError(f"element type {spec.dtype!r}", f"one of {', '.join(TYPES)}")
    rank = len(spec.dims)
    if not 1 <= rank <= MOST_RANK:
        raise TensorMapError(f"a tensor map of rank {rank}", "1 to 5", "reshape, or give dims=…")
    if spec.lower:
        if not len(spec.strides) + 1 == len(spec.lower) + 2 == len(spec.upper) + 2 == len(steps) == rank \
                or len(spec.box) != 2:
            raise TensorMapError(f"dims={spec.dims}, strides={spec.strides}, box={spec.box}, "
                                 f"lower={spec.lower}, upper={spec.upper}, "
                                 f"element_strides={spec.element_strides}",
                                 f"for an im2col map of rank {rank} channels and pixels, corners of "
                                 f"{rank - 2} offsets, {rank} element strides, {rank - 1} strides")
    elif not len(spec.strides) + 1 == len(spec.box) == len(steps) == rank:
        raise TensorMapError(f"dims={spec.dims}, strides={spec.strides}, box={spec.box}, "
                             f"element_strides={spec.element_strides}",
                             f"for rank {rank} {rank} extents of the box, {rank} element strides, {rank - 1} "
                             "strides")
    if min(*spec.dims, *spec.box, *steps, *spec.strides, 0) < 0 or max(*spec.box, *steps) >= 1 << 32 or \
            max(spec.address, *spec.dims, *spec.strides) >= 1 << 64:
        _explain(spec, steps)


def _explain(spec: TensorMapSpec, steps: tuple[int, ...]) -> None:
    """Raises the limit that a map breaks, where it is one that the emulator knows."""
    from tinygrad_nv.ptx.emulator import TensorMap
    if spec.lower:
        channels, pixels = spec.box
        TensorMap.im2col(spec.address, spec.lower[::-1], spec.upper[::-1], channels, pixels, spec.swizzle,
                         spec.dims[::-1], spec.strides[::-1], spec.dtype, steps[::-1], spec.interleave,
                         spec.l2_promotion, spec.fill)
        return
    TensorMap.of_tiles(spec.address, spec.box[::-1], spec.swizzle, spec.dims[::-1], spec.strides[::-1],
                    spec.dtype, steps[::-1], spec.interleave, spec.l2_promotion, spec.fill)
