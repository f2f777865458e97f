"""Groups of ranks of one machine, over memory that they share (csrc/shared.c).

Protocol: `connect(struct, leads, name, exchange)` maps the group's memory into each rank. The first member
makes it without a name (memfd), tells the others the path of its descriptor (/proc/PID/fd/N), and closes that
when all have mapped it: when the ranks have ended, however they did, the memory is free, and no file is left.
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
    size = group_bytes(struct.size)
    made, own = without_name(size) if leads else (-1, "")
    try:
        path = exchange(f"{name}/memory", own.encode())[0].decode()
        try: memory = mmap.mmap(made, size) if leads else map_memory(path, size)
        except OSError as error:
            raise DistError(f"the memory of another rank, {path}, cannot be mapped: {error.strerror}",
                            "ranks of one user in one container",
                            "start them with mpiexec: MPI carries their messages") from error
        exchange(f"{name}/mapped", b"")
    finally:
        if made >= 0: os.close(made)
    struct.shared = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # about 80 µs, where each rank has a core to itself
    struct.looks = 2000 if struct.size <= (os.cpu_count() or 1) else 20
    struct.slot_bytes, struct.run = SLOT_BYTES, library().address("shared_run")
    return memory


def without_name(size: int) -> tuple[int, str]:
    """Memory that has no file: its descriptor, and the path by which other processes map it while that is
    open."""
    made = os.memfd_create("tinygrad_nv", os.MFD_CLOEXEC)
    os.ftruncate(made, size)
    return made, f"/proc/{os.getpid()}/fd/{made}"


def map_memory(path: str, size: int) -> mmap.mmap:
    """Memory of another process. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try: return mmap.mmap(descriptor, size)
    finally: os.close(descriptor)


def group_bytes(ranks: int) -> int:
    """Returns the bytes of the memory that so many ranks share."""
    return int(library().c.shared_bytes(ctypes.c_uint64(ranks), ctypes.c_uint64(SLOT_BYTES)))
