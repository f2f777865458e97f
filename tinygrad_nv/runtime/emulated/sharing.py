"""Memory of emulated devices that other processes address, as CUDA's of another process (cuIpcOpenMemHandle).

Protocol: it lies in files without names (memfd). A handle says how large one is and where its descriptor is,
which the process that shares it keeps open. A launch that polls such memory sleeps between looks, and asks
`Emulator.waited` whether to go on. Devices that are peers in one process have none: there a thread that waits
for what no device does is a deadlock.
"""
from __future__ import annotations

import mmap
import os
from bisect import insort
from typing import Any

import numpy as np

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.emulator import Buffer, Emulator

NONE = -1   # the descriptor of what another process shares


class Sharing:
    """That part of an `EmulatedDriver`. `shared`: descriptors by address."""
    emulator: Emulator
    buffers: dict[int, Buffer]
    held: dict[int, Buffer]
    addresses: list[int]
    used_bytes: int
    shared: dict[int, int]
    among_peers: Any
    free: Any

    def share(self, nbytes: int) -> tuple[int, bytes]:
        descriptor = os.memfd_create("tinygrad_nv", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        address = self._mapped(descriptor, nbytes)
        self.shared[address] = descriptor
        return address, f"{nbytes} /proc/{os.getpid()}/fd/{descriptor}".encode()

    def open_shared(self, handle: bytes) -> int:
        nbytes, path = handle.decode().split()
        try: descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DriverError(f"memory of another process, {path}, cannot be mapped: {error.strerror}",
                              "processes of one user in one container") from error
        try: address = self._mapped(descriptor, int(nbytes))
        finally: os.close(descriptor)
        self.shared[address] = NONE
        return address

    def close_shared(self, address: int) -> None:
        if (descriptor := self.shared.pop(address, None)) is None:
            raise DriverError(f"address {address:#x} is closed", "what was shared or opened")
        self.free(address)
        if descriptor != NONE: os.close(descriptor)

    def _mapped(self, descriptor: int, nbytes: int) -> int:
        if self.among_peers:
            raise DriverError("memory of other processes on a device that has peers in this one",
                              "a process for each device")
        buffer = self.emulator.mapped(np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8))
        self.buffers[buffer.ptr] = self.held[buffer.ptr] = buffer
        insort(self.addresses, buffer.ptr)
        self.used_bytes += nbytes
        return buffer.ptr
