"""Kernels of the API: what nvcc's code registers, launches, attributes, entry points, tensor maps."""
from __future__ import annotations

import struct
from collections.abc import Sequence

from tinygrad_nv.errors import TensorMapError
from tinygrad_nv.host import fatbin
from tinygrad_nv.host.api import Dim3, Int, Text, Unsigned, Word, api
from tinygrad_nv.host.calls_memory import put
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.launches import Launch
from tinygrad_nv.host.library import names
from tinygrad_nv.host.modules import Kernel, Module
from tinygrad_nv.host.session import Session
from tinygrad_nv.ptx.emulator import TensorMap
from tinygrad_nv.ptx.emulator.arguments import Triple
from tinygrad_nv.ptx.emulator.tensormap import FILLS, INTERLEAVES, L2_PROMOTIONS, SWIZZLES

IGNORED = (0, 1, 3, 5, 8, 9, 10, 14)       # attributes that change no result: policies, priorities
COOPERATIVE, CLUSTER, PDL = 2, 4, 6
# numbers of cuTensorMapEncodeTiled
MAP_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32ftz", "tf32",
             "tf32ftz")


# **** what nvcc's code registers ****

@api("__cudaRegisterFatBinary")
def register_fat_binary(s: Session, wrapper: Word) -> int:
    magic, _, data, _ = struct.unpack("<IIQQ", s.wire.read(wrapper, 24))
    image = b""
    if magic == fatbin.WRAPPER and data:
        image = s.wire.read(data, fatbin.size_of(s.wire.read(data, fatbin.HEADER_BYTES)))
    handle = s.handle(wrapper)
    s.modules[handle] = Module(image, s.gpu.arch)
    return handle


@api("__cudaRegisterFatBinaryEnd", "__cudaUnregisterFatBinary")
def register_end(s: Session, handle: Word) -> None: ...


@api("__cudaInitModule")
def init_module(s: Session, handle: Word) -> int: return 1


@api("__cudaRegisterFunction")
def register_function(s: Session, handle: Word, host: Word, device: Word, name: Text) -> None:
    s.functions[host] = handle, name


@api("__cudaRegisterVar")
def register_variable(s: Session, handle: Word, host: Word, device: Word, name: Text) -> None:
    s.symbols[host] = handle, name


# **** launches ****

@api("__cudaPushCallConfiguration")
def push_configuration(s: Session, grid: Dim3, block: Dim3, smem: Word, stream: Word) -> None:
    s.thread.configurations.append((grid, block, smem, stream))


@api("__cudaPopCallConfiguration")
def pop_configuration(s: Session, grid: Word, block: Word, smem: Word, stream: Word) -> None:
    if not s.thread.configurations: raise CudaError(Status.INVALID_CONFIGURATION)
    found = s.thread.configurations.pop()
    put(s, grid, *found[0], size=4)
    put(s, block, *found[1], size=4)
    put(s, smem, found[2])
    put(s, stream, found[3])


def parameters(s: Session, kernel: Kernel, pointers: int) -> tuple[bytes, ...]:
    """The bytes of each parameter, which an array of pointers tells."""
    wanted = [parameter.nbytes for parameter in kernel.function.parameters.values()]
    found = struct.unpack(f"<{len(wanted)}Q", s.wire.read(pointers, 8 * len(wanted)))
    return tuple(s.wire.read(address, nbytes) for address, nbytes in zip(found, wanted, strict=True))


@api("cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchCooperativeKernel")
def launch_kernel(s: Session, function: Word, grid: Dim3, block: Dim3, arguments: Word, smem: Word,
                  stream: Word) -> None:
    kernel = s.kernel(function)
    s.launch(Launch(kernel, grid, block, (1, 1, 1), smem, parameters(s, kernel, arguments)), s.stream(stream))


@api("cudaLaunchKernelExC")
def launch_kernel_ex(s: Session, config: Word, function: Word, arguments: Word) -> None:
    *extents, smem, stream, attributes, count = struct.unpack("<3I3IQQQI", s.wire.read(config, 52))
    launch_with(s, function, tuple(extents[:3]), tuple(extents[3:]), smem, stream, arguments,
                attributes, count)


@api("cuLaunchKernelEx")
def launch_kernel_ex_driver(s: Session, config: Word, function: Word, arguments: Word, extra: Word) -> None:
    *extents, smem, stream, attributes, count = struct.unpack("<3I3II4xQQI", s.wire.read(config, 52))
    launch_with(s, function, tuple(extents[:3]), tuple(extents[3:]), smem, stream, arguments,
                attributes, count)


@api("cuLaunchKernel")
def launch_kernel_driver(s: Session, function: Word, x: Unsigned, y: Unsigned, z: Unsigned, bx: Unsigned,
                         by: Unsigned, bz: Unsigned, smem: Unsigned, stream: Word, arguments: Word,
                         extra: Word) -> None:
    launch_with(s, function, (x, y, z), (bx, by, bz), smem, stream, arguments, 0, 0)


def launch_with(s: Session, function: int, grid: Sequence[int], block: Sequence[int], smem: int, stream: int,
                arguments: int, attributes: int, count: int) -> None:
    """A launch with a list of attributes, each of 72 bytes."""
    kernel, pdl = s.kernel(function), False
    cluster: Sequence[int] = kernel.function.directives.get("reqnctapercluster", (1, 1, 1))
    data = s.wire.read(attributes, 72 * count)
    for at in range(0, 72 * count, 72):
        number, = struct.unpack_from("<I", data, at)
        if number == CLUSTER: cluster = struct.unpack_from("<3I", data, at + 8)
        elif number == PDL: pdl = bool(struct.unpack_from("<I", data, at + 8)[0])
        elif number not in (*IGNORED, COOPERATIVE): raise CudaError(Status.NOT_SUPPORTED)
    s.launch(Launch(kernel, triple(grid), triple(block), triple(cluster), smem,
                    parameters(s, kernel, arguments), pdl), s.stream(stream))


def triple(extents: Sequence[int]) -> Triple:
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


# **** functions ****

@api("cudaFuncSetAttribute", "cuFuncSetAttribute")
def set_attribute(s: Session, function: Word, attribute: Int, value: Int) -> None:
    s.kernel(function).attributes[attribute] = value


@api("__cudaGetKernel", "cudaGetKernel", "cudaGetFuncBySymbol")
def get_kernel(s: Session, handle: Word, function: Word) -> None:
    if function not in s.functions: raise CudaError(Status.INVALID_DEVICE_FUNCTION)
    put(s, handle, function)


# **** entry points ****

@api("cudaGetDriverEntryPoint", "cudaGetDriverEntryPoint_ptsz")
def entry_point(s: Session, name: Text, function: Word, flags: Word, status: Word) -> None:
    found = address_of(s, name)
    put(s, function, found)
    if status: put(s, status, 0 if found else 1, size=4)
    if not found: raise CudaError(Status.SYMBOL_NOT_FOUND)


@api("cudaGetDriverEntryPointByVersion")
def entry_point_by_version(s: Session, name: Text, function: Word, version: Unsigned, flags: Word,
                           status: Word) -> None:
    entry_point(s, name, function, flags, status)


@api("cuGetProcAddress", "cuGetProcAddress_v2")
def proc_address(s: Session, name: Text, function: Word, version: Int, flags: Word, status: Word) -> None:
    entry_point(s, name, function, flags, status)


def address_of(s: Session, name: str) -> int:
    """Where a function of the driver is in the program; 0: there is none of that name. The newest version of
    it is meant."""
    known = names()
    for candidate in (f"{name}_v3", f"{name}_v2", name):
        if candidate in known: return s.wire.trampolines + 16 * known.index(candidate)
    return 0


# **** tensor maps ****

@api("cuTensorMapEncodeTiled")
def encode_tiled(s: Session, into: Word, kind: Int, rank: Unsigned, address: Word, dims: Word, strides: Word,
                 box: Word, steps: Word, interleave: Int, swizzle: Int, l2: Int, fill: Int) -> None:
    if not 1 <= rank <= 5: raise CudaError(Status.INVALID_VALUE)
    def read(at: int, form: str, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}{form}", s.wire.read(at, struct.calcsize(form) * count))[::-1]
    try:
        made = TensorMap.tiled(address, read(box, "I", rank), list(SWIZZLES)[swizzle], read(dims, "Q", rank),
                               read(strides, "Q", rank - 1), MAP_TYPES[kind], read(steps, "I", rank),
                               INTERLEAVES[interleave], L2_PROMOTIONS[l2], FILLS[fill])
    except (TensorMapError, IndexError) as error: raise CudaError(Status.INVALID_VALUE, str(error)) from None
    s.wire.write(into, made.encode())
