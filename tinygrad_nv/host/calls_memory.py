"""Memory of the API: allocation, copies, fills, variables."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.host.api import Int, Unsigned, Word, api
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.memory import Allocation, Kind
from tinygrad_nv.host.session import Session
from tinygrad_nv.host.wire import BASE

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)


def put(s: Session, pointer: int, *values: int, size: int = 8) -> None:
    """Writes integers where a pointer argument points. Raises `CudaError` for a null pointer."""
    if not pointer: raise CudaError(Status.INVALID_VALUE)
    most = (1 << 8 * size) - 1
    s.wire.write(pointer, b"".join((value & most).to_bytes(size, "little") for value in values))


@api("cudaMalloc", "cuMemAlloc", "cuMemAlloc_v2")
def malloc(s: Session, pointer: Word, nbytes: Word) -> None:
    put(s, pointer, s.memory.alloc(nbytes, Kind.DEVICE, s.wire).address if nbytes else 0)


@api("cudaMallocAsync", "cuMemAllocAsync")
def malloc_async(s: Session, pointer: Word, nbytes: Word, stream: Word) -> None:
    malloc(s, pointer, nbytes)


@api("cudaMallocHost", "cuMemAllocHost", "cuMemAllocHost_v2")
def malloc_host(s: Session, pointer: Word, nbytes: Word) -> None:
    put(s, pointer, s.memory.alloc(nbytes, Kind.HOST, s.wire).address if nbytes else 0)


@api("cudaHostAlloc", "cuMemHostAlloc")
def host_alloc(s: Session, pointer: Word, nbytes: Word, flags: Unsigned) -> None:
    malloc_host(s, pointer, nbytes)


@api("cudaMallocManaged", "cuMemAllocManaged")
def malloc_managed(s: Session, pointer: Word, nbytes: Word, flags: Unsigned) -> None:
    put(s, pointer, s.memory.alloc(nbytes, Kind.MANAGED, s.wire).address)


@api("cudaFree", "cuMemFree", "cuMemFree_v2")
def free(s: Session, pointer: Word) -> None:
    if pointer: s.memory.free(pointer, (Kind.DEVICE, Kind.MANAGED), s.wire)


@api("cudaFreeAsync", "cuMemFreeAsync")
def free_async(s: Session, pointer: Word, stream: Word) -> None: free(s, pointer)


@api("cudaFreeHost", "cuMemFreeHost")
def free_host(s: Session, pointer: Word) -> None:
    if pointer: s.memory.free(pointer, (Kind.HOST,), s.wire)


@api("cudaMemGetInfo", "cuMemGetInfo", "cuMemGetInfo_v2")
def memory_info(s: Session, free_bytes: Word, total: Word) -> None:
    put(s, free_bytes, s.memory.limit - s.memory.used)
    put(s, total, s.memory.limit)


# **** copies ****

def copy(s: Session, target: int, source: int, nbytes: int, kind: int = DEFAULT) -> None:
    """From anywhere to anywhere."""
    if not nbytes: return
    into, out = s.memory.find(target, nbytes), s.memory.find(source, nbytes)
    if kind != DEFAULT and (
            (kind in (HOST_TO_DEVICE, DEVICE_TO_DEVICE) and into is None)
            or (kind in (DEVICE_TO_HOST, DEVICE_TO_DEVICE) and out is None)
            or (kind in (HOST_TO_HOST, DEVICE_TO_HOST) and into is not None and into.kind == Kind.DEVICE)
            or (kind in (HOST_TO_HOST, HOST_TO_DEVICE) and out is not None and out.kind == Kind.DEVICE)):
        raise CudaError(Status.INVALID_VALUE)
    if into is not None: done = _copy_in(s, into, target, source, nbytes, out)
    elif out is not None: done = _copy_out(s, target, out, source, nbytes)
    else: s.wire.write(target, s.wire.read(source, nbytes))
    if (into or out) is not None and not done: raise CudaError(Status.INVALID_VALUE)


def _copy_in(s: Session, into: Allocation, target: int, source: int, nbytes: int,
             out: Allocation | None) -> bool:
    at, done = target - into.address, True
    if out is not None:
        begin = source - out.address
        into.buffer.data[at:at + nbytes] = out.buffer.data[begin:begin + nbytes]
    elif into.own: done = s.wire.copy_in(target - BASE, source, nbytes)
    else: into.buffer.data[at:at + nbytes] = np.frombuffer(s.wire.read(source, nbytes), np.uint8)
    if into.buffer.valid is not None:
        into.buffer.valid[at:at + nbytes] = 1 if out is None or out.buffer.valid is None else \
            out.buffer.valid[begin:begin + nbytes]
    return done


def _copy_out(s: Session, target: int, out: Allocation, source: int, nbytes: int) -> bool:
    if out.own: return s.wire.copy_out(target, source - BASE, nbytes)
    at = source - out.address
    s.wire.write(target, out.buffer.data[at:at + nbytes].tobytes())
    return True


@api("cudaMemcpy")
def memcpy(s: Session, target: Word, source: Word, nbytes: Word, kind: Int) -> None:
    copy(s, target, source, nbytes, kind)


@api("cudaMemcpyAsync")
def memcpy_async(s: Session, target: Word, source: Word, nbytes: Word, kind: Int, stream: Word) -> None:
    s.stream(stream)
    copy(s, target, source, nbytes, kind)


def fill(s: Session, target: int, pattern: bytes, count: int) -> None:
    """Repeats a pattern."""
    nbytes = count * len(pattern)
    if not nbytes: return
    into = s.memory.find(target, nbytes)
    if into is None: raise CudaError(Status.INVALID_VALUE)
    at = target - into.address
    if len(set(pattern)) == 1: into.buffer.data[at:at + nbytes] = pattern[0]
    else: into.buffer.data[at:at + nbytes] = np.tile(np.frombuffer(pattern, np.uint8), count)
    if into.buffer.valid is not None: into.buffer.valid[at:at + nbytes] = 1


@api("cudaMemset")
def memset(s: Session, target: Word, value: Int, nbytes: Word) -> None:
    fill(s, target, bytes([value & 255]), nbytes)


@api("cudaMemsetAsync")
def memset_async(s: Session, target: Word, value: Int, nbytes: Word, stream: Word) -> None:
    s.stream(stream)
    fill(s, target, bytes([value & 255]), nbytes)


@api("cudaMemcpyToSymbol")
def memcpy_to_symbol(s: Session, symbol: Word, source: Word, nbytes: Word, offset: Word, kind: Int) -> None:
    copy(s, variable(s, symbol) + offset, source, nbytes)


@api("cudaMemcpyFromSymbol")
def memcpy_from_symbol(s: Session, target: Word, symbol: Word, nbytes: Word, offset: Word, kind: Int) -> None:
    copy(s, target, variable(s, symbol) + offset, nbytes)


def variable(s: Session, symbol: int) -> int:
    """The address of a variable, which copies find from now on."""
    buffer = s.variable(symbol)
    if buffer.ptr not in s.memory.by_address:
        s.memory.enter(Allocation(buffer.ptr, buffer.nbytes, Kind.DEVICE, buffer, own=False))
    return buffer.ptr


@api("cudaGetSymbolAddress")
def symbol_address(s: Session, pointer: Word, symbol: Word) -> None: put(s, pointer, variable(s, symbol))


@api("cudaGetSymbolSize")
def symbol_size(s: Session, size: Word, symbol: Word) -> None: put(s, size, s.variable(symbol).nbytes)
