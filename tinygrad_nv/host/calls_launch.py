"""Launches of the API, and tensor maps."""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from tinygrad_nv.errors import TensorMapError
from tinygrad_nv.host.api import Dim3, Int, Unsigned, Word, api
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.launches import Launch, check
from tinygrad_nv.host.modules import Kernel
from tinygrad_nv.host.session import Session
from tinygrad_nv.host.works import Kernel as KernelWork
from tinygrad_nv.ptx.emulator import TensorMap
from tinygrad_nv.ptx.emulator.arguments import Triple
from tinygrad_nv.ptx.emulator.tensormap import FILLS, INTERLEAVES, L2_PROMOTIONS, SWIZZLES

ATTRIBUTE_BYTES = 72
COOPERATIVE, CLUSTER, PDL, PREFERRED = 2, 4, 6, 11
IGNORED = (0, 1, 3, 5, 8, 9, 10, PREFERRED, 14)     # policies, priorities and preferences change no result
# numbers of cuTensorMapEncodeTiled
MAP_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32ftz", "tf32",
             "tf32ftz")
BUFFER, SIZE, END = 1, 2, 0     # CU_LAUNCH_PARAM_


def launch_of(s: Session, handle: int, grid: Sequence[int], block: Sequence[int], smem: int, arguments: int,
              attributes: bytes = b"", extra: int = 0) -> KernelWork:
    """A launch as the program states it. Raises `CudaError` where CUDA refuses it."""
    kernel = s.kernel(handle)
    cluster: Sequence[int] = kernel.function.directives.get("reqnctapercluster", (1, 1, 1))
    given = pack_block(s, kernel, extra) if extra and not arguments else parameters(s, kernel, arguments)
    found = Launch(kernel, triple(grid), triple(block), triple(cluster), smem, given)
    return KernelWork(with_attributes(found, attributes, s.gpu.arch))


def with_attributes(launch: Launch, attributes: bytes, arch: str) -> Launch:
    """The launch with a list of attributes, which CUDA takes."""
    for at in range(0, len(attributes), ATTRIBUTE_BYTES):
        number, *value = struct.unpack_from("<I4x3I", attributes, at)
        if number == CLUSTER: launch = replace(launch, cluster=triple(value))
        elif number == PDL: launch = replace(launch, pdl=bool(value[0]))
        elif number not in (*IGNORED, COOPERATIVE):
            raise CudaError(Status.NOT_SUPPORTED, f"launch attribute {number}")
    check(launch, arch)
    return launch


def triple(extents: Sequence[int]) -> Triple:
    """Three of up to three."""
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def parameters(s: Session, kernel: Kernel, pointers: int) -> tuple[bytes, ...]:
    """The bytes of each parameter, which an array of pointers tells."""
    wanted = [parameter.nbytes for parameter in kernel.function.parameters.values()]
    found = struct.unpack(f"<{len(wanted)}Q", s.wire.read(pointers, 8 * len(wanted)))
    return tuple(s.wire.read(address, nbytes) for address, nbytes in zip(found, wanted, strict=True))


def pack_block(s: Session, kernel: Kernel, extra: int) -> tuple[bytes, ...]:
    """The bytes of each parameter in one block, which a list of names and values tells."""
    values: dict[int, int] = {}
    while (name := struct.unpack("<Q", s.wire.read(extra, 8))[0]) != END:
        values[name], = struct.unpack("<Q", s.wire.read(extra + 8, 8))
        extra += 16
    if BUFFER not in values or SIZE not in values:
        raise CudaError(Status.INVALID_VALUE, "a launch without parameters")
    nbytes, = struct.unpack("<Q", s.wire.read(values[SIZE], 8))
    data = s.wire.read(values[BUFFER], nbytes).ljust(kernel.function.parameter_bytes, b"\0")
    return tuple(data[each.offset:each.offset + each.nbytes] for each in kernel.function.parameters.values())


# **** the runtime's launches ****

@api("__cudaPushCallConfiguration")
def push_configuration(s: Session, grid: Dim3, block: Dim3, smem: Word, stream: Word) -> None:
    s.thread.configurations.append((grid, block, smem, stream))


@api("__cudaPopCallConfiguration")
def pop_configuration(s: Session, grid: Word, block: Word, smem: Word, stream: Word) -> None:
    if not s.thread.configurations: raise CudaError(Status.INVALID_CONFIGURATION)
    found = s.thread.configurations.pop()
    s.put(grid, *found[0], size=4)
    s.put(block, *found[1], size=4)
    s.put(smem, found[2])
    s.put(stream, found[3])


@api("cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchCooperativeKernel")
def launch_kernel(s: Session, function: Word, grid: Dim3, block: Dim3, arguments: Word, smem: Word,
                  stream: Word) -> None:
    s.streams.submit(launch_of(s, function, grid, block, smem, arguments), s.stream(stream))


@api("cudaLaunchKernelExC")
def launch_kernel_ex(s: Session, config: Word, function: Word, arguments: Word) -> None:
    *extents, smem, stream, attributes, count = struct.unpack("<6IQQQI", s.wire.read(config, 52))
    _launch_ex(s, function, extents, smem, stream, arguments, s.wire.read(attributes,
                                                                          ATTRIBUTE_BYTES * count))


# **** the driver's ****

@api("cuLaunchKernelEx")
def launch_kernel_ex_driver(s: Session, config: Word, function: Word, arguments: Word, extra: Word) -> None:
    *extents, smem, stream, attributes, count = struct.unpack("<7I4xQQI", s.wire.read(config, 52))
    _launch_ex(s, function, extents, smem, stream, arguments, s.wire.read(attributes,
                                                                          ATTRIBUTE_BYTES * count),
               extra)


def _launch_ex(s: Session, function: int, extents: Sequence[int], smem: int, stream: int, arguments: int,
               attributes: bytes, extra: int = 0) -> None:
    work = launch_of(s, function, extents[:3], extents[3:], smem, arguments, attributes, extra)
    s.streams.submit(work, s.stream(stream))


@api("cuLaunchKernel")
def launch_kernel_driver(s: Session, function: Word, x: Unsigned, y: Unsigned, z: Unsigned, bx: Unsigned,
                         by: Unsigned, bz: Unsigned, smem: Unsigned, stream: Word, arguments: Word,
                         extra: Word) -> None:
    _launch_ex(s, function, (x, y, z, bx, by, bz), smem, stream, arguments, b"", extra)


@api("cuLaunchCooperativeKernel")
def launch_cooperative_driver(s: Session, function: Word, x: Unsigned, y: Unsigned, z: Unsigned, bx: Unsigned,
                              by: Unsigned, bz: Unsigned, smem: Unsigned, stream: Word,
                              arguments: Word) -> None:
    _launch_ex(s, function, (x, y, z, bx, by, bz), smem, stream, arguments, b"")


# **** tensor maps ****

@api("cuTensorMapEncodeTiled")
def encode_tiled(s: Session, into: Word, kind: Int, rank: Unsigned, address: Word, dims: Word, strides: Word,
                 box: Word, steps: Word, interleave: Int, swizzle: Int, l2: Int, fill: Int) -> None:
    if not 1 <= rank <= 5:
        raise CudaError(Status.INVALID_VALUE, f"a tensor map of rank {rank}; 1 to 5 is allowed")
    try:
        made = TensorMap.of_tiles(address, _array(s, box, "I", rank), list(SWIZZLES)[swizzle],
                               _array(s, dims, "Q", rank), _array(s, strides, "Q", rank - 1), MAP_TYPES[kind],
                               _array(s, steps, "I", rank), INTERLEAVES[interleave], L2_PROMOTIONS[l2],
                               FILLS[fill])
    except (TensorMapError, IndexError) as error: raise CudaError(Status.INVALID_VALUE, str(error)) from None
    s.wire.write(into, made.encode())


@api("cuTensorMapEncodeIm2col")
def encode_im2col(s: Session, into: Word, kind: Int, rank: Unsigned, address: Word, dims: Word, strides: Word,
                  lower: Word, upper: Word, channels: Unsigned, pixels: Unsigned, steps: Word,
                  interleave: Int,
                  swizzle: Int, l2: Int, fill: Int) -> None:
    if not 3 <= rank <= 5:
        raise CudaError(Status.INVALID_VALUE, f"an im2col map of rank {rank}; 3 to 5 is allowed")
    try:
        made = TensorMap.im2col(address, _array(s, lower, "i", rank - 2), _array(s, upper, "i", rank - 2),
                                channels,
                                pixels, list(SWIZZLES)[swizzle], _array(s, dims, "Q", rank),
                                _array(s, strides, "Q", rank - 1), MAP_TYPES[kind], _array(s, steps, "I",
                                                                                           rank),
                                INTERLEAVES[interleave], L2_PROMOTIONS[l2], FILLS[fill])
    except (TensorMapError, IndexError) as error: raise CudaError(Status.INVALID_VALUE, str(error)) from None
    s.wire.write(into, made.encode())


@api("cuTensorMapReplaceAddress")
def replace_address(s: Session, tensor_map: Word, address: Word) -> None: s.put(tensor_map, address)


def _array(s: Session, at: int, form: str, count: int) -> tuple[int, ...]:
    """Numbers of the program's, innermost dimension first; ours are the other way round."""
    return struct.unpack(f"<{count}{form}", s.wire.read(at, struct.calcsize(form) * count))[::-1]
