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

GRANULE = 1 << 16       # addresses of allocations are multiples, and so much of nothing is between two


class Kind(Enum):
    """Where memory is: on the device alone, page-locked on the host, or managed (both)."""
    DEVICE = 2
    HOST = 1
    MANAGED = 3


@dataclass(eq=False)
class Allocation:
    """Bytes at `address`. `buffer` is what the emulator has; `own`: in the file (variables of modules are
    not)."""
    address: int
    nbytes: int
    kind: Kind
    buffer: Buffer
    own: bool = True


class Memory:
    """All of a program's allocations; `limit` bytes of device memory at most."""

    def __init__(self, emulator: Emulator, limit: int) -> None:
        self.emulator, self.limit, self.used = emulator, limit, 0
        self.file = os.memfd_create("device memory", os.MFD_CLOEXEC)
        os.ftruncate(self.file, SIZE)
        self.map = mmap.mmap(self.file, SIZE, mmap.MAP_SHARED)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.next = 0
        self.by_address: dict[int, Allocation] = {}
        self.addresses: list[int] = []

    def alloc(self, nbytes: int, kind: Kind, wire: Wire) -> Allocation:
        """New memory. Raises `CudaError`."""
        room = -(-(nbytes + GRANULE) // GRANULE) * GRANULE
        if (kind != Kind.HOST and self.used + nbytes > self.limit) or self.next + room > SIZE:
            raise CudaError(Status.MEMORY_ALLOCATION)
        offset, self.next = self.next, self.next + room
        if kind != Kind.DEVICE and not wire.map(offset, -(-nbytes // GRANULE) * GRANULE):
            raise CudaError(Status.MEMORY_ALLOCATION)
        # bytes that no kernel wrote are found in device memory alone: the host writes unseen
        valid = np.zeros(nbytes, np.uint8) if self.emulator.check and kind == Kind.DEVICE else None
        buffer = self.emulator.adopt(BASE + offset, self.bytes[offset:offset + nbytes], valid)
        if kind != Kind.HOST: self.used += nbytes
        return self.enter(Allocation(buffer.ptr, nbytes, kind, buffer))

    def enter(self, made: Allocation) -> Allocation:
        """An allocation, which `find` finds from now on."""
        self.by_address[made.address] = made
        insort(self.addresses, made.address)
        return made

    def free(self, address: int, kinds: tuple[Kind, ...], wire: Wire) -> None:
        """Raises `CudaError` for what is no beginning of an allocation of these kinds."""
        found = self.by_address.get(address)
        if found is None or not found.own or found.kind not in kinds: raise CudaError(Status.INVALID_VALUE)
        del self.by_address[address]
        self.addresses.remove(address)
        self.emulator.free(found.buffer)
        offset, room = address - BASE, -(-found.nbytes // GRANULE) * GRANULE
        if found.kind != Kind.HOST: self.used -= found.nbytes
        if found.kind != Kind.DEVICE: wire.map(offset, room, there=False)
        self.map.madvise(mmap.MADV_REMOVE, offset, room)    # the bytes go back to the system

    def find(self, address: int, nbytes: int = 1) -> Allocation | None:
        """The allocation with these bytes, all of them; None for addresses of the host. Raises `CudaError`
        for bytes that end outside of it."""
        at = bisect_right(self.addresses, address) - 1
        if at >= 0:
            found = self.by_address[self.addresses[at]]
            if address < found.address + max(found.nbytes, 1):
                if address + nbytes <= found.address + found.nbytes: return found
                raise CudaError(Status.INVALID_VALUE)
        if BASE <= address < BASE + SIZE: raise CudaError(Status.INVALID_VALUE)
        return None
