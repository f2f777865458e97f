"""Device memory of a program: one file, mapped here as a whole, and in the program where the host may touch
it.

Protocol: addresses are those of the program's pointers, and are not used again. `find` gives the allocation
that holds an address. Kernels see buffers of the emulator over the same bytes.
"""
from __future__ import annotations

import mmap
import os
from bisect import bisect_right, insort
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.wire import BASE, SIZE, Wire
from tinygrad_nv.ptx.emulator import Buffer, Emulator
from tinygrad_nv.runtime.emulated.host import EmulatedHostMemory

GRANULE = 1 << 16       # addresses of allocations are multiples, and so much of nothing is between two


class Kind(Enum):
    """Place of memory: on the device alone, page-locked on the host, or managed (both)."""
    DEVICE = 2
    HOST = 1
    MANAGED = 3


class HostPages(EmulatedHostMemory):
    """Page-locked memory that is there already."""

    def __init__(self, data: np.ndarray) -> None:
        self.view = data.data
        self.owned = []


@dataclass(eq=False)
class Allocation:
    """Bytes at `address`. `buffer` is what the emulator has; `own`: in the file (variables of modules are
    not); `flags`: of cudaHostAlloc; `pages`: page-locked memory, whose bytes belong to copies until these are
    known to be done."""
    address: int
    nbytes: int
    kind: Kind
    buffer: Buffer
    own: bool = True
    flags: int = 0
    pages: HostPages | None = None


def new_file() -> int:
    """The file of device memory: of its bytes only those exist that were written."""
    file = os.memfd_create("device memory", os.MFD_CLOEXEC)
    os.ftruncate(file, SIZE)
    return file


class Memory:
    """All of a program's allocations; `limit` bytes of device memory at most."""

    def __init__(self, file: int, wire: Wire, emulator: Emulator, limit: int) -> None:
        self.wire, self.emulator, self.limit, self.used = wire, emulator, limit, 0
        self.file = file
        self.map = mmap.mmap(file, SIZE, mmap.MAP_SHARED)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.next = 0
        self.by_address: dict[int, Allocation] = {}
        self.freed: dict[int, int] = {}     # bytes by address
        self.addresses: list[int] = []

    def alloc(self, nbytes: int, kind: Kind = Kind.DEVICE, flags: int = 0) -> Allocation:
        """New memory. Raises `CudaError`."""
        room = -(-(nbytes + GRANULE) // GRANULE) * GRANULE
        if (kind != Kind.HOST and self.used + nbytes > self.limit) or self.next + room > SIZE:
            raise CudaError(Status.MEMORY_ALLOCATION,
                            f"{nbytes} bytes asked for, {self.limit - self.used} of {self.limit} are free")
        offset, self.next = self.next, self.next + room
        if kind != Kind.DEVICE and not self.wire.map(offset, _whole(nbytes)):
            raise CudaError(Status.MEMORY_ALLOCATION, "the program cannot map memory")
        # bytes that no kernel wrote are found in device memory alone: the host writes unseen
        valid = np.zeros(nbytes, np.uint8) if self.emulator.check and kind == Kind.DEVICE else None
        data = self.bytes[offset:offset + nbytes]
        buffer = self.emulator.adopt(Buffer(BASE + offset, data, valid, data.shape, data.dtype,
                                            lambda: self._map_copy(offset, nbytes)))
        if kind != Kind.HOST: self.used += nbytes
        pages = HostPages(data) if kind == Kind.HOST and self.emulator.check else None
        return self.enter(Allocation(buffer.ptr, nbytes, kind, buffer, flags=flags, pages=pages))

    def _map_copy(self, offset: int, nbytes: int) -> np.ndarray:
        """The bytes, of which pages are copied as they are written."""
        if not nbytes: return np.zeros(0, np.uint8)
        made = mmap.mmap(self.file, _whole(nbytes), mmap.MAP_PRIVATE, offset=offset)
        return np.frombuffer(made, np.uint8)[:nbytes]

    def enter(self, made: Allocation) -> Allocation:
        """An allocation, which `find` finds from now on."""
        self.by_address[made.address] = made
        insort(self.addresses, made.address)
        return made

    def to_free(self, address: int, kinds: tuple[Kind, ...]) -> Allocation:
        """The allocation that begins at an address. Raises `CudaError` where none of these kinds does."""
        found = self.by_address.get(address)
        if found is None or not found.own or found.kind not in kinds:
            raise CudaError(Status.INVALID_VALUE, f"address {address:#x} is freed: {self.describe(address)}")
        return found

    def free(self, address: int, kinds: tuple[Kind, ...]) -> Allocation:
        """Returns what was there. Raises `CudaError` as `to_free` does."""
        found = self.to_free(address, kinds)
        self.leave(found)
        self.freed[address] = found.nbytes
        self.emulator.free(found.buffer)
        offset, room = address - BASE, _whole(found.nbytes)
        if found.kind != Kind.HOST: self.used -= found.nbytes
        if found.kind != Kind.DEVICE: self.wire.map(offset, room, there=False)
        self.map.madvise(mmap.MADV_REMOVE, offset, room)    # the bytes go back to the system
        return found

    def leave(self, gone: Allocation) -> None:
        """An allocation that `find` does not find any more."""
        del self.by_address[gone.address]
        self.addresses.remove(gone.address)

    def find(self, address: int, nbytes: int = 1) -> Allocation | None:
        """The allocation with these bytes, all of them; None for addresses of the host. Raises `CudaError`
        for bytes that end outside of it."""
        at = bisect_right(self.addresses, address) - 1
        found = self.by_address[self.addresses[at]] if at >= 0 else None
        if found is not None and address < found.address + max(found.nbytes, 1):
            if address + nbytes <= found.address + found.nbytes: return found
            raise CudaError(Status.INVALID_VALUE, f"{nbytes} bytes at {address:#x}: {self.describe(address)}")
        if BASE <= address < BASE + SIZE:
            raise CudaError(Status.INVALID_VALUE, f"{nbytes} bytes at {address:#x}: {self.describe(address)}")
        return None

    def describe(self, address: int) -> str:
        """Returns what is at an address, in words."""
        at = bisect_right(self.addresses, address) - 1
        found = self.by_address[self.addresses[at]] if at >= 0 else None
        if found is not None and address < found.address + found.nbytes + GRANULE:
            return f"byte {address - found.address} of an allocation of {found.nbytes}"
        for start, nbytes in self.freed.items():
            if start <= address < start + nbytes:
                return f"byte {address - start} of {nbytes} that have been freed"
        if BASE <= address < BASE + SIZE: return "device memory that is not allocated"
        return "no device memory"


def _whole(nbytes: int) -> int: return -(-nbytes // GRANULE) * GRANULE
