"""Memory of emulated devices that other processes address, as CUDA's of another process (cuIpcOpenMemHandle).

Protocol: it lies in files without names (memfd). A handle says how large one is and where its descriptor is,
which the process that shares it keeps open. A process that has opened one locks it (flock) until it closes
it: to free memory that another process has open, which CUDA does not define, is an error here. A launch that
polls such memory sleeps between looks, and asks `Emulator.waited` whether to go on. Devices that are peers in
one process have none: there a thread that waits for what no device does is a deadlock.
"""
from __future__ import annotations

import fcntl
import mmap
import os
from bisect import insort
from typing import Any

import numpy as np

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.emulator import Buffer, Emulator


class Sharing:
    """Part of an `EmulatedDriver` that shares memory with other processes. `shared`: descriptors by address,
    and whether the memory is this process's own."""
    emulator: Emulator
    buffers: dict[int, Buffer]
    held: dict[int, Buffer]
    addresses: list[int]
    used_bytes: int
    shared: dict[int, tuple[int, bool]]
    among_peers: Any
    free: Any

    def share(self, nbytes: int) -> tuple[int, bytes]:
        descriptor = os.memfd_create("tinygrad_nv", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        address = self._map_memory(descriptor, nbytes)
        self.shared[address] = descriptor, True
        return address, f"{nbytes} /proc/{os.getpid()}/fd/{descriptor}".encode()

    def open_shared(self, handle: bytes) -> int:
        nbytes, path = handle.decode().split()
        try: descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DriverError(f"memory of another process, {path}, cannot be mapped: {error.strerror}",
                              "processes of one user in one container") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            address = self._map_memory(descriptor, int(nbytes))
        except BaseException:
            os.close(descriptor)
            raise
        self.shared[address] = descriptor, False
        return address

    def close_shared(self, address: int) -> None:
        if address not in self.shared:
            raise DriverError(f"address {address:#x} is closed", "what was shared or opened")
        descriptor, own = self.shared[address]
        if own:
            try: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DriverError(f"memory at {address:#x} is freed, which another process has open",
                                  "memory that all others have closed") from error
        del self.shared[address]
        self.free(address)
        fcntl.flock(descriptor, fcntl.LOCK_UN)      # by name: the mapping has the descriptor, too
        os.close(descriptor)

    def _map_memory(self, descriptor: int, nbytes: int) -> int:
        if self.among_peers:
            raise DriverError("memory of other processes on a device that has peers in this one",
                              "a process for each device")
        buffer = self.emulator.map_memory(np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8))
        self.buffers[buffer.ptr] = self.held[buffer.ptr] = buffer
        insort(self.addresses, buffer.ptr)
        self.used_bytes += nbytes
        return buffer.ptr
