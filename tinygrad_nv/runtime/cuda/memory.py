"""Memory of a CUDA device: a pool, page-locked memory, and staging for pageable bytes.

Protocol. Device memory is stream-ordered, from a pool of the driver's own that keeps what is freed. Two
streams are the pool's: in the one of allocations nothing ever waits (the pool may not make it: no internal
dependencies), so that it is synchronised at once and an address is good in every stream when `alloc` returns;
the one of frees waits for all that other streams hold at that call. Memory freed while the device is busy can
thus be had again when that work is done; where there is none left, allocation waits for it.

`Staging` is a ring of page-locked memory. A copy from the host goes through it in pieces: the bytes are taken
when the call returns, and the host waits only for a piece of the ring that the device has yet to read. CUDA
itself may wait for the whole stream before it takes pageable memory.
"""
from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.cuda.context import CUDAContext
from tinygrad_nv.runtime.cuda.streams import CUDAStream

RING_BYTES = 32 << 20
PIECE_BYTES = RING_BYTES // 4
MOST_PIECES = 256       # in flight: as many events
KEEP_ALL = 2**64 - 1    # release threshold: nothing goes back to the system while the pool lives


class StreamOrderedPool:
    """The driver's memory pool and the sizes of what it gave."""

    def __init__(self, gpu: CUDAContext) -> None:
        self.gpu, cu = gpu, gpu.cu
        self.sizes: dict[int, int] = {}
        props = cu.CUmemPoolProps()
        props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.handleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = gpu.ordinal
        self.handle = gpu.call("cuMemPoolCreate", props)
        gpu.keep("cuMemPoolDestroy", self.handle)
        names = cu.CUmemPool_attribute
        gpu.call("cuMemPoolSetAttribute", self.handle, names.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                 cu.cuuint64_t(KEEP_ALL))
        gpu.call("cuMemPoolSetAttribute", self.handle,
                 names.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0)
        self.allocations, self.frees = gpu.new_stream(), gpu.new_stream()

    @property
    def used_bytes(self) -> int: return sum(tuple(self.sizes.values()))

    def alloc(self, nbytes: int) -> int:
        if nbytes <= 0: raise DriverError(f"an allocation of {nbytes} bytes", "a size above 0")
        address = self._try(nbytes)
        if address is None:
            self.make_room()
            address = self._try(nbytes)
        if address is None:
            free, total = self.gpu.call("cuMemGetInfo")
            raise MemoryError(f"{nbytes} bytes asked for, {self.used_bytes} in use of the {total} that the "
                              f"{self.gpu.properties.name} device has; {free + self.slack()} bytes are free")
        self.sizes[address] = nbytes
        return address

    def _try(self, nbytes: int) -> int | None:
        """Memory that every stream may use, or None when there is not so much."""
        status, *given = self.gpu.status("cuMemAllocFromPoolAsync", nbytes, self.handle, self.allocations)
        if status.name == "CUDA_ERROR_OUT_OF_MEMORY": return None
        address = self.gpu.check(status, *given, doing=f"allocating {nbytes} bytes")
        self.gpu.call("cuStreamSynchronize", self.allocations)
        return int(address)

    def make_room(self) -> None:
        """Waits for what is being freed, and gives back what the pool keeps in pieces of other sizes."""
        self.gpu.call("cuStreamSynchronize", self.frees)
        self.gpu.call("cuMemPoolTrimTo", self.handle, 0)

    def free(self, address: int) -> None:
        if self.sizes.pop(address, None) is None:
            raise DriverError(f"address {address:#x} is freed", "what alloc returned and is not freed yet")
        if self.gpu.lost or self.gpu.is_forked: return
        for stream in tuple(self.gpu.streams):
            if stream.busy: self._after(stream)
        self.gpu.call("cuMemFreeAsync", address, self.frees)

    def _after(self, stream: CUDAStream) -> None:
        """Frees from now on wait for what a stream holds."""
        if self.gpu.capturing(stream): return
        stream.busy = False  # before the event: what another thread submits meanwhile sets it again
        self.gpu.call("cuEventRecord", stream.mark, stream.handle)
        self.gpu.call("cuStreamWaitEvent", self.frees, stream.mark, 0)

    def slack(self) -> int:
        """Bytes that the pool keeps and no allocation holds."""
        names = self.gpu.cu.CUmemPool_attribute
        reserved, used = (int(self.gpu.call("cuMemPoolGetAttribute", self.handle, which)) for which in (
            names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
        return reserved - used

    def share(self, ordinal: int) -> None:
        """Lets another device read and write the pool's memory."""
        cu = self.gpu.cu
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.gpu.call("cuMemPoolSetAccess", self.handle, [access], 1)

    def empty(self) -> None:
        """Gives back everything, and waits until it is."""
        for address in tuple(self.sizes): self.free(address)
        self.gpu.call("cuStreamSynchronize", self.frees)


class CUDAHostMemory(driver.HostMemory):
    """Page-locked memory; `address` is where it lies on the host."""

    def __init__(self, gpu: CUDAContext, nbytes: int) -> None:
        if nbytes <= 0: raise DriverError(f"an allocation of {nbytes} bytes", "a size above 0")
        status, *given = gpu.status("cuMemHostAlloc", nbytes, gpu.cu.CU_MEMHOSTALLOC_PORTABLE)
        if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise MemoryError(f"{nbytes} bytes of page-locked memory asked for: the host has not so many")
        self.gpu = gpu
        self.address = int(gpu.check(status, *given, doing=f"page-locking {nbytes} bytes"))
        self.view = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")
        self.give_back = gpu.own(self, "cuMemFreeHost", self.address, after_work=True)

    def free(self) -> None:
        self.view = memoryview(b"")
        self.give_back()


class Staging:
    """The ring. Pieces in flight are in the order they were taken, each with the event after its copy."""

    def __init__(self, gpu: CUDAContext) -> None:
        self.gpu, self.lock = gpu, threading.Lock()
        self.memory = CUDAHostMemory(gpu, RING_BYTES)
        self.head = 0
        self.pieces: deque[tuple[int, int, Any]] = deque()
        self.spare: list[Any] = []

    def copy(self, address: int, source: memoryview, stream: CUDAStream) -> None:
        """Bytes to the device, taken when this returns."""
        with self.lock:
            for first in range(0, source.nbytes, PIECE_BYTES):
                self._piece(address + first, source[first:first + PIECE_BYTES], stream)

    def _piece(self, address: int, source: memoryview, stream: CUDAStream) -> None:
        nbytes = source.nbytes
        start = self._room(nbytes)
        self.memory.view[start:start + nbytes] = source
        self.gpu.call("cuMemcpyHtoDAsync", address, self.memory.address + start, nbytes, stream.handle)
        event = self.spare.pop() if self.spare else self.gpu.new_event(timing=False)
        self.gpu.call("cuEventRecord", event, stream.handle)
        self.pieces.append((start, start + nbytes, event))
        self.head = start + nbytes

    def _room(self, nbytes: int) -> int:
        """Returns where so many bytes may be put: pieces still to be read there are waited for, the oldest
        first."""
        start = self.head
        if start + nbytes > RING_BYTES:  # from the beginning: what is left of the last round ends first
            while self.pieces and self.pieces[0][0] >= start: self._wait()
            start = 0
        while self.pieces and self.pieces[0][0] < start + nbytes and start < self.pieces[0][1]: self._wait()
        if len(self.pieces) >= MOST_PIECES: self._wait()
        return start

    def _wait(self) -> None:
        _, _, event = self.pieces.popleft()
        self.spare.append(event)
        self.gpu.call("cuEventSynchronize", event)

    def close(self) -> None:
        """Waits for what is in flight and destroys the events."""
        while self.pieces: self._wait()
        for event in self.spare: self.gpu.call("cuEventDestroy", event)
        self.memory.free()
