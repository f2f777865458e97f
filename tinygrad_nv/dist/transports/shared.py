"""Groups of ranks of one machine, over memory that they share (csrc/shared.c).

Protocol: `connect(struct, members, key, exchange)` maps the group's memory into each rank. The first member
makes it without a name (memfd), tells where its descriptor is (/proc/PID/fd/N), and closes it when all have
mapped it: when a rank is killed, the system gives the memory back, and there is no file that could be left.
"""
from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

from tinygrad_nv.dist.transports.library import GroupStruct, library
from tinygrad_nv.errors import DistError

# of each rank: four slots. A step of 256 KiB stays in the second cache of two ranks
SLOT_BYTES = 256 << 10
Exchange = Callable[[str, bytes], Sequence[bytes]]  # (name, own) -> those of all members, in order


def connect(struct: GroupStruct, leads: bool, name: str, exchange: Exchange) -> mmap.mmap:
    """Maps the memory of a group and makes its structure use it. Raises `DistError` where ranks cannot reach
    each other's memory."""
    c = library()
    size = c.c.shared_bytes(ctypes.c_uint64(struct.size), ctypes.c_uint64(SLOT_BYTES))
    made = -1
    try:
        if leads:
            made = os.memfd_create("tinygrad_nv", os.MFD_CLOEXEC)
            os.ftruncate(made, size)
        own = f"/proc/{os.getpid()}/fd/{made}".encode() if leads else b""
        told = exchange(f"{name}/memory", own)[0].decode()
        memory = mmap.mmap(made, size) if leads else _mapped(told, size)
        exchange(f"{name}/mapped", b"")
    finally:
        if made >= 0: os.close(made)
    struct.shared = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # about 80 µs, where each rank has a core to itself
    struct.looks = 2000 if struct.size <= (os.cpu_count() or 1) else 20
    struct.slot_bytes, struct.run = SLOT_BYTES, c.address("shared_run")
    return memory


def _mapped(path: str, size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try: return mmap.mmap(descriptor, size)
        finally: os.close(descriptor)
    except OSError as error:
        raise DistError(f"the memory of another rank, {path}, cannot be mapped: {error.strerror}",
                        "ranks of one user in one container",
                        "start them with mpiexec: MPI carries what they have to say") from error
