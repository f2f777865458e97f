"""Allocation: of the device, page-locked, managed, from pools; and what CUDA says of addresses."""
from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tinygrad_nv.host.api import Extent, Int, Unsigned, Word, api
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.memory import Kind
from tinygrad_nv.host.session import Session
from tinygrad_nv.host.works import Lifetime
from tinygrad_nv.runtime.emulated.order import ALLOCATES, FREES

PITCH = 512             # bytes, of rows of cudaMallocPitch
MEMORY_TYPE = {Kind.HOST: 1, Kind.DEVICE: 2, Kind.MANAGED: 3}      # cudaMemoryType


@dataclass(eq=False)
class Pool:
    """A memory pool: its attributes, which change nothing."""
    attributes: dict[int, int] = field(default_factory=dict)


def allocate(s: Session, nbytes: int, kind: Kind = Kind.DEVICE, flags: int = 0) -> int:
    """Returns the address of new memory; 0 for none."""
    return s.memory.alloc(nbytes, kind, flags).address if nbytes else 0


@api("cudaMalloc", "cuMemAlloc_v2")
def malloc(s: Session, pointer: Word, nbytes: Word) -> None: s.put(pointer, allocate(s, nbytes))


@api("cudaMallocAsync", "cuMemAllocAsync")
def malloc_async(s: Session, pointer: Word, nbytes: Word, stream: Word) -> None:
    if not nbytes: return s.put(pointer, 0)
    memory = s.memory.alloc(nbytes)
    s.put(pointer, memory.address)
    s.streams.submit(Lifetime(memory, ALLOCATES), s.stream(stream))


@api("cudaMallocFromPoolAsync", "cuMemAllocFromPoolAsync")
def malloc_from_pool(s: Session, pointer: Word, nbytes: Word, pool: Word, stream: Word) -> None:
    s.object(pool, Pool)
    malloc_async(s, pointer, nbytes, stream)


@api("cudaMallocHost", "cuMemAllocHost_v2")
def malloc_host(s: Session, pointer: Word, nbytes: Word) -> None:
    s.put(pointer, allocate(s, nbytes, Kind.HOST))


@api("cudaHostAlloc", "cuMemHostAlloc")
def host_alloc(s: Session, pointer: Word, nbytes: Word, flags: Unsigned) -> None:
    s.put(pointer, allocate(s, nbytes, Kind.HOST, flags))


@api("cudaMallocManaged", "cuMemAllocManaged")
def malloc_managed(s: Session, pointer: Word, nbytes: Word, flags: Unsigned) -> None:
    if not nbytes: raise CudaError(Status.INVALID_VALUE, "0 bytes of managed memory")
    s.put(pointer, allocate(s, nbytes, Kind.MANAGED))


@api("cudaMallocPitch")
def malloc_pitch(s: Session, pointer: Word, pitch: Word, width: Word, height: Word) -> None:
    rows = -(-width // PITCH) * PITCH
    s.put(pointer, allocate(s, rows * height))
    s.put(pitch, rows)


@api("cuMemAllocPitch_v2")
def malloc_pitch_driver(s: Session, pointer: Word, pitch: Word, width: Word, height: Word,
                        element: Unsigned) -> None:
    malloc_pitch(s, pointer, pitch, width, height)


@api("cudaMalloc3D")
def malloc_3d(s: Session, pitched: Word, extent: Extent) -> None:
    width, height, depth = extent
    rows = -(-width // PITCH) * PITCH
    s.put(pitched, allocate(s, rows * height * depth), rows, width, height)


@api("cudaFree", "cuMemFree_v2")
def free(s: Session, pointer: Word) -> None:
    if not pointer: return
    s.streams.complete(None)       # as CUDA does
    s.streams.forget(s.memory.free(pointer, (Kind.DEVICE, Kind.MANAGED)).buffer)


@api("cudaFreeAsync", "cuMemFreeAsync")
def free_async(s: Session, pointer: Word, stream: Word) -> None:
    into = s.stream(stream)
    if not pointer: return
    memory = s.memory.to_free(pointer, (Kind.DEVICE,))
    s.streams.submit(Lifetime(memory, FREES), into)
    if into.capture is None: s.streams.forget(s.memory.free(pointer, (Kind.DEVICE,)).buffer)


@api("cudaFreeHost", "cuMemFreeHost")
def free_host(s: Session, pointer: Word) -> None:
    if pointer: s.streams.forget(s.memory.free(pointer, (Kind.HOST,)).buffer)


@api("cudaMemGetInfo", "cuMemGetInfo_v2")
def memory_info(s: Session, free_bytes: Word, total: Word) -> None:
    s.put(free_bytes, s.memory.limit - s.memory.used)
    s.put(total, s.memory.limit)


@api("cudaMemAdvise", "cuMemAdvise", "cudaMemPrefetchAsync", "cuMemPrefetchAsync", "cuMemPrefetchAsync_v2",
     "cuMemAdvise_v2", "cudaMemAdvise_v2", "cudaMemPrefetchAsync_v2")
def advise(s: Session, pointer: Word, nbytes: Word) -> None: s.memory.find(pointer, nbytes)


# **** what is at an address ****

@api("cudaPointerGetAttributes")
def pointer_attributes(s: Session, into: Word, pointer: Word) -> None:
    found = s.memory.find(pointer)
    if found is None: values = 0, -2, 0, pointer        # cudaMemoryTypeUnregistered, cudaInvalidDeviceId
    else: values = MEMORY_TYPE[found.kind], 0, pointer, pointer if found.kind != Kind.DEVICE else 0
    s.wire.write(into, struct.pack("<iiQQ", *values) + bytes(64))


@api("cuPointerGetAttribute")
def pointer_attribute(s: Session, into: Word, attribute: Int, pointer: Word) -> None:
    found = s.memory.find(pointer)
    if found is None: raise CudaError(Status.INVALID_VALUE, f"{pointer:#x} is {s.memory.describe(pointer)}")
    values = {2: (4, 1 if found.kind == Kind.HOST else 2), 3: (8, pointer),
              4: (8, pointer if found.kind != Kind.DEVICE else 0), 8: (4, found.kind == Kind.MANAGED),
              9: (4, 0), 11: (8, found.address), 12: (8, found.nbytes)}      # CUpointer_attribute
    if attribute not in values: raise CudaError(Status.NOT_SUPPORTED, f"attribute {attribute} of a pointer")
    s.put(into, values[attribute][1], size=values[attribute][0])


@api("cuMemGetAddressRange_v2")
def address_range(s: Session, base: Word, size: Word, pointer: Word) -> None:
    found = s.memory.find(pointer)
    if found is None: raise CudaError(Status.INVALID_VALUE, f"{pointer:#x} is {s.memory.describe(pointer)}")
    s.fill_in(base, found.address)
    s.fill_in(size, found.nbytes)


@api("cudaHostGetDevicePointer", "cuMemHostGetDevicePointer_v2")
def device_pointer(s: Session, into: Word, pointer: Word, flags: Unsigned) -> None:
    found = s.memory.find(pointer)
    if found is None: raise CudaError(Status.INVALID_VALUE, f"{pointer:#x} is not memory of cudaHostAlloc")
    s.put(into, pointer)


@api("cudaHostGetFlags", "cuMemHostGetFlags")
def host_flags(s: Session, into: Word, pointer: Word) -> None:
    found = s.memory.find(pointer)
    if found is None or found.kind != Kind.HOST: raise CudaError(Status.INVALID_VALUE)
    s.put(into, found.flags, size=4)


@api("cudaHostRegister", "cuMemHostRegister_v2")
def host_register(s: Session, pointer: Word, nbytes: Word, flags: Unsigned) -> None:
    """Copies go on as before; kernels do not reach the memory."""
    if s.memory.find(pointer, nbytes) is not None: raise CudaError(Status.HOST_MEMORY_ALREADY_REGISTERED)


@api("cudaHostUnregister", "cuMemHostUnregister")
def host_unregister(s: Session, pointer: Word) -> None: ...


# **** pools ****

@api("cudaDeviceGetDefaultMemPool", "cuDeviceGetDefaultMemPool", "cudaDeviceGetMemPool", "cuDeviceGetMemPool")
def default_pool(s: Session, into: Word, device: Int) -> None:
    pools = [each for each in s.objects.values() if isinstance(each, Pool)]
    s.put(into, s.handle(pools[0] if pools else Pool()))


@api("cudaMemPoolCreate", "cuMemPoolCreate")
def pool_create(s: Session, into: Word, properties: Word) -> None: s.put(into, s.handle(Pool()))


@api("cudaMemPoolDestroy", "cuMemPoolDestroy")
def pool_destroy(s: Session, pool: Word) -> None: s.drop(pool, Pool)


@api("cudaDeviceSetMemPool", "cuDeviceSetMemPool")
def set_pool(s: Session, device: Int, pool: Word) -> None: s.object(pool, Pool)


@api("cudaMemPoolTrimTo", "cuMemPoolTrimTo", "cudaMemPoolSetAccess", "cuMemPoolSetAccess")
def pool_trim(s: Session, pool: Word) -> None: s.object(pool, Pool)


@api("cudaMemPoolSetAttribute", "cuMemPoolSetAttribute")
def pool_set_attribute(s: Session, pool: Word, attribute: Int, value: Word) -> None:
    size = 4 if attribute <= 3 else 8       # the first are flags
    s.object(pool, Pool).attributes[attribute] = int.from_bytes(s.wire.read(value, size), "little")


@api("cudaMemPoolGetAttribute", "cuMemPoolGetAttribute")
def pool_attribute(s: Session, pool: Word, attribute: Int, value: Word) -> None:
    s.put(value, s.object(pool, Pool).attributes.get(attribute, int(attribute <= 3)),
          size=4 if attribute <= 3 else 8)
