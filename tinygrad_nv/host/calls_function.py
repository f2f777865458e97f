"""Attributes of kernels, and occupancy."""
from __future__ import annotations

import struct
from math import prod

from tinygrad_nv.host.api import Int, Word, api
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.gpus import CTAS_OF_SM, REGISTERS
from tinygrad_nv.host.launches import DYNAMIC_SHARED, largest_cluster, most_threads
from tinygrad_nv.host.modules import STATIC_LIMIT, Kernel
from tinygrad_nv.host.session import Session
from tinygrad_nv.ptx.emulator.arguments import SHARED_LIMIT, SHARED_OF_SM, THREADS_OF_SM
from tinygrad_nv.ptx.gpcs import most_clusters

RESERVED = 1024         # bytes of shared memory that the system has of each CTA


def numbers(s: Session, kernel: Kernel) -> dict[int, int]:
    """CUfunction_attribute: the others are 0."""
    cluster = kernel.function.directives.get("reqnctapercluster", ())
    binary = 10 * s.gpu.capability[0] + s.gpu.capability[1]
    return {0: most_threads(kernel), 1: kernel.static_bytes, 3: kernel.local_bytes, 4: kernel.registers,
            5: binary, 6: binary, 8: max(0, STATIC_LIMIT - kernel.static_bytes), 9: -1,
            10: int(bool(cluster)),
            **{11 + i: x for i, x in enumerate(cluster)}, **kernel.attributes}


@api("cudaFuncGetAttributes")
def function_attributes(s: Session, into: Word, function: Word) -> None:
    of = numbers(s, s.kernel(function)).get
    values = [of(number, 0) for number in (1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 14)]
    s.wire.write(into, struct.pack("<3Q13i", *values) + bytes(64))


@api("cuFuncGetAttribute")
def function_attribute(s: Session, into: Word, attribute: Int, function: Word) -> None:
    s.put(into, numbers(s, s.kernel(function)).get(attribute, 0), size=4)


@api("cuKernelGetAttribute")
def kernel_attribute(s: Session, into: Word, attribute: Int, function: Word, device: Int) -> None:
    function_attribute(s, into, attribute, function)


@api("cudaFuncSetAttribute", "cuFuncSetAttribute")
def set_attribute(s: Session, function: Word, attribute: Int, value: Int) -> None:
    kernel = s.kernel(function)
    most = SHARED_LIMIT[int(s.gpu.arch[3:5])] - kernel.static_bytes
    if attribute == DYNAMIC_SHARED and not 0 <= value <= most:
        raise CudaError(Status.INVALID_VALUE,
                        f"{value} bytes of dynamic shared memory for {kernel.name}; 0 to {most} is allowed")
    if attribute < DYNAMIC_SHARED:
        raise CudaError(Status.INVALID_VALUE, f"attribute {attribute} is not to be set")
    kernel.attributes[attribute] = value


@api("cuKernelSetAttribute")
def set_kernel_attribute(s: Session, attribute: Int, value: Int, function: Word, device: Int) -> None:
    set_attribute(s, function, attribute, value)


@api("cudaKernelSetAttributeForDevice")
def set_attribute_for_device(s: Session, function: Word, attribute: Int, value: Int, device: Int) -> None:
    set_attribute(s, function, attribute, value)


@api("cudaFuncSetCacheConfig", "cuFuncSetCacheConfig", "cuKernelSetCacheConfig", "cudaFuncSetSharedMemConfig",
     "cuFuncSetSharedMemConfig")
def set_cache(s: Session, function: Word) -> None: s.kernel(function)


# **** occupancy ****

def ctas_of_sm(s: Session, kernel: Kernel, threads: int, dynamic: int) -> int:
    """CTAs that fit on an SM: by threads, registers (where ptxas tells them) and shared memory."""
    number, warps = int(s.gpu.arch[3:5]), -(-threads // 32)
    if threads > most_threads(kernel): return 0
    registers = -(-kernel.registers * 32 // 256) * 256 * warps
    shared = kernel.static_bytes + dynamic
    if shared > SHARED_LIMIT[number]: return 0
    return min(THREADS_OF_SM[number] // (32 * warps), REGISTERS // max(registers, 1),
               SHARED_OF_SM[number] // (shared + RESERVED), CTAS_OF_SM)


@api("cudaOccupancyMaxActiveBlocksPerMultiprocessor", "cuOccupancyMaxActiveBlocksPerMultiprocessor",
     "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
     "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags")
def active_blocks(s: Session, into: Word, function: Word, threads: Int, dynamic: Word) -> None:
    if threads < 1: raise CudaError(Status.INVALID_VALUE, f"a block of {threads} threads")
    s.put(into, ctas_of_sm(s, s.kernel(function), threads, dynamic), size=4)


@api("cudaOccupancyAvailableDynamicSMemPerBlock", "cuOccupancyAvailableDynamicSMemPerBlock")
def available_shared(s: Session, into: Word, function: Word, blocks: Int, threads: Int) -> None:
    number, kernel = int(s.gpu.arch[3:5]), s.kernel(function)
    if blocks < 1: raise CudaError(Status.INVALID_VALUE, f"{blocks} blocks")
    each = SHARED_OF_SM[number] // blocks - RESERVED - kernel.static_bytes
    s.put(into, max(0, min(each, SHARED_LIMIT[number] - kernel.static_bytes)))


@api("cudaOccupancyMaxActiveClusters", "cuOccupancyMaxActiveClusters")
def active_clusters(s: Session, into: Word, first: Word, second: Word) -> None:
    runtime = s.name.startswith("cuda")
    function, config = first, second
    kernel = s.kernel(function)
    *extents, smem, _, attributes, count = struct.unpack("<6IQQQI" if runtime else "<7I4xQQI",
                                                         s.wire.read(config, 52))
    size, data = 1, s.wire.read(attributes, 72 * count)
    for at in range(0, len(data), 72):
        number, *value = struct.unpack_from("<I4x3I", data, at)
        if number == 4: size = prod(value)
    most = largest_cluster(kernel)
    if size > most: raise CudaError(Status.INVALID_CLUSTER_SIZE, f"a cluster of {size} CTAs; at most {most}")
    each = ctas_of_sm(s, kernel, prod(extents[3:]), smem)
    s.put(into, most_clusters(size, s.gpu.figures.sms, each) if each else 0, size=4)


@api("cudaOccupancyMaxPotentialClusterSize", "cuOccupancyMaxPotentialClusterSize")
def potential_cluster(s: Session, into: Word, function: Word, config: Word) -> None:
    most = largest_cluster(s.kernel(function))
    s.put(into, most if int(s.gpu.arch[3:5]) >= 90 else 1, size=4)


@api("cuOccupancyMaxPotentialBlockSize", "cuOccupancyMaxPotentialBlockSizeWithFlags")
def potential_block(s: Session, grid: Word, block: Word, function: Word, of_block: Word, dynamic: Word,
                    limit: Int) -> None:
    if of_block: raise CudaError(Status.NOT_SUPPORTED, "shared memory that depends on the block")
    kernel = s.kernel(function)
    most = min(most_threads(kernel), limit or 1024)
    best = max(range(32, most + 1, 32), key=lambda threads: (ctas_of_sm(s, kernel, threads,
                                                                        dynamic) * threads,
                                                             threads))
    s.put(grid, ctas_of_sm(s, kernel, best, dynamic) * s.gpu.figures.sms, size=4)
    s.put(block, best, size=4)


