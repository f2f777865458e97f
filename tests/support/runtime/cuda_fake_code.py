"""The fake driver's functions of modules, kernels, launches and tensor maps."""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cuda.bindings.driver as cu

from tests.support.runtime.cuda_fake_parts import Function, Module
from tests.support.runtime.cuda_structs import LaunchConfig, read
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.emulator import TensorMap
from tinygrad_nv.runtime.cuda import tensor_map as cuda_map

if TYPE_CHECKING:
    from tests.support.runtime.cuda_fake import Fake

S = cu.CUresult
OK = (S.CUDA_SUCCESS,)
TYPES = {code: name for name, code in (("u8", 0), ("u16", 1), ("u32", 2), ("s32", 3), ("u64", 4), ("s64", 5),
                                       ("f16", 6), ("f32", 7), ("f64", 8), ("bf16", 9), ("tf32", 11))}


def module_load_data_ex(fake: Fake, image: bytes, count: int, options: list[Any], values: list[Any]) -> Any:
    assert count == len(options) == len(values)
    assert [each.name for each in options] == ["CU_JIT_ERROR_LOG_BUFFER",
                                               "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES"]
    assert isinstance(values[0], bytearray), "the log cannot be written"
    assert len(values[0]) == values[1]
    if image[:4] == b"\x7fELF":
        if image not in fake.sources: return (S.CUDA_ERROR_INVALID_IMAGE,)
        image = fake.sources[image].encode()
    else:
        assert image[-1:] == b"\0", "PTX text ends with a null"
    try: return (*OK, fake.make(cu.CUmodule, Module(fake.here(), image)))
    except NVError as error:
        words = str(error).encode()[:values[1] - 1]
        values[0][:len(words)] = words
        return (S.CUDA_ERROR_INVALID_PTX,)


def module_unload(fake: Fake, module: Any) -> Any:
    made = fake.drop(module, Module)
    assert made.device is fake.here(), "a module of another context"
    for number, each in fake.handles.copy().items():    # a collection of garbage may drop handles
        if isinstance(each, Function) and each.module is made: fake.drop(number, Function)
    made.emu.unload()
    return OK


def module_get_function(fake: Fake, module: Any, name: bytes) -> Any:
    made = fake.get(module, Module)
    if (found := made.function(name.decode())) is None: return (S.CUDA_ERROR_NOT_FOUND,)
    if found not in fake.handles.values(): found.handle = fake.make(cu.CUfunction, found)
    return (*OK, found.handle)


def module_get_function_count(fake: Fake, module: Any) -> Any:
    return (*OK, len(fake.get(module, Module).names))


def module_enumerate_functions(fake: Fake, count: int, module: Any) -> Any:
    names = fake.get(module, Module).names[:count]
    return (*OK, [module_get_function(fake, module, name.encode())[1] for name in names])


def func_get_name(fake: Fake, function: Any) -> Any:
    return (*OK, fake.get(function, Function).emu.name.encode())


def func_get_attribute(fake: Fake, which: Any, function: Any) -> Any:
    a = fake.get(function, Function).emu.attributes
    name = which.name.removeprefix("CU_FUNC_ATTRIBUTE_")
    return (*OK, {"SHARED_SIZE_BYTES": a.static_smem, "LOCAL_SIZE_BYTES": a.local_bytes,
                  "NUM_REGS": a.registers, "MAX_THREADS_PER_BLOCK": a.max_threads}[name])


def func_set_attribute(fake: Fake, function: Any, which: Any, value: int) -> Any:
    found = fake.get(function, Function)
    limit = found.module.device.emu.properties.shared_limit - found.emu.attributes.static_smem
    name = which.name.removeprefix("CU_FUNC_ATTRIBUTE_")
    if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES" and not 0 <= value <= limit:
        return (S.CUDA_ERROR_INVALID_VALUE,)
    found.set[name] = value
    return OK


def func_get_param_info(fake: Fake, function: Any, index: int) -> Any:
    found = fake.get(function, Function).parameters
    if index >= len(found): return (S.CUDA_ERROR_INVALID_VALUE,)
    return (*OK, found[index].offset, found[index].nbytes)


def launch_kernel_ex(fake: Fake, config: Any, function: Any, params: int, extra: int) -> Any:
    given, found = read(LaunchConfig, config), fake.get(function, Function)
    assert extra == 0
    status, work = found.launch(given, params, given.attrs, given.numAttrs)
    assert found.module.device is fake.here(), "a function of another context"
    return (getattr(S, status),) if work is None else fake.put(work, given.hStream)


def occupancy_max_active_clusters(fake: Fake, function: Any, config: Any) -> Any:
    """`fake.clusters` by their size, else those of the emulated device."""
    given, found = read(LaunchConfig, config), fake.get(function, Function)
    status, work = found.launch(given, 0, given.attrs, given.numAttrs)
    assert work is not None, status
    size = work.cluster[0] * work.cluster[1] * work.cluster[2]
    assert work.dynamic_smem > found.module.device.emu.properties.shared_of_sm // 2, "two CTAs an SM"
    return (*OK, fake.clusters.get(size, found.module.device.emu.most_clusters(size)))


def get_proc_address(fake: Fake, symbol: bytes, version: int, flags: int) -> Any:
    encode = {"cuTensorMapEncodeTiled": _tiled, "cuTensorMapEncodeIm2col": _im2col}[name := symbol.decode()]
    assert (version, flags) == (12000, 0)
    fake.encoders[name] = cuda_map.SIGNATURES[name](functools.partial(encode, fake))
    address = ctypes.cast(fake.encoders[name], ctypes.c_void_p).value
    return (*OK, address, cu.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS)


def _tiled(fake: Fake, place: int, dtype: int, rank: int, address: int, dims: Any, strides: Any, box: Any,
           steps: Any, *kinds: int) -> int:
    """cuTensorMapEncodeTiled, called as C."""
    return _encoded(fake, "cuTensorMapEncodeTiled", place, rank, lambda: TensorMap.of_tiles(
        address or 0, box[:rank][::-1], *_map(dtype, rank, dims, strides, steps, *kinds)))


def _im2col(fake: Fake, place: int, dtype: int, rank: int, address: int, dims: Any, strides: Any, lower: Any,
            upper: Any, channels: int, pixels: int, steps: Any, *kinds: int) -> int:
    """cuTensorMapEncodeIm2col, called as C."""
    corners = lower[:rank - 2][::-1], upper[:rank - 2][::-1]
    return _encoded(fake, "cuTensorMapEncodeIm2col", place, rank, lambda: TensorMap.im2col(
        address or 0, *corners, channels, pixels, *_map(dtype, rank, dims, strides, steps, *kinds)))


def _map(dtype: int, rank: int, dims: Any, strides: Any, steps: Any, interleave: int, swizzle: int,
         promotion: int, fill: int) -> tuple[Any, ...]:
    """Swizzle, dims, strides, dtype, element strides, interleave, promotion, fill."""
    return (("none", "32B", "64B", "128B")[swizzle], dims[:rank][::-1], strides[:rank - 1][::-1],
            TYPES[dtype], steps[:rank][::-1], ("none", "16B", "32B")[interleave],
            ("none", "64B", "128B", "256B")[promotion], ("zero", "nan")[fill])


def _encoded(fake: Fake, name: str, place: int, rank: int, make: Callable[[], TensorMap]) -> int:
    """A status, with the map at `place`."""
    fake.calls[name] += 1
    if place % 128 or not 1 <= rank <= 5:
        fake.complaints.append(f"{name} at {place:#x}, rank {rank}")
        return int(S.CUDA_ERROR_INVALID_VALUE)
    try: made = make()
    except NVError: return int(S.CUDA_ERROR_INVALID_VALUE)
    ctypes.memmove(place, made.encode(), 128)
    fake.maps = made
    return 0
