"""Bytes into device tensors without a second copy of them.

Protocol: `allocate(tensor)` gives an empty tensor its memory, `allocate_arena(tensors)` gives many of them
one mapping; `host_bytes(tensor)` is a writable view of that memory where the host can address it (the CPU
device), so that files are read straight into place; `write(tensor, offset, data)` puts bytes at an offset
on any device; `discard(tensors)` gives the system their memory back, and they stay where they are. Nothing
here schedules a kernel.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface
from tinygrad.runtime.support.memory import TLSFAllocator
from tinygrad.tensor import all_tensors

_copying = threading.Lock()  # tinygrad's allocators are not for several threads
# tinygrad keeps freed buffers for others of the same size, and weights and pages of another model have others
FREED_AT_ONCE = BufferSpec(nolru=True)
ALIGNMENT = 256  # bytes: what tinygrad's own arenas use; a vector load needs 64


def allocate(tensor: Tensor) -> Buffer:
    """The memory of a tensor made by `Tensor.empty`, allocated now and given back with the tensor. Raises
    MemoryError."""
    buffer = cast(Buffer, tensor.uop.buffer)
    if not buffer.is_allocated(): buffer.options = FREED_AT_ONCE
    try: return buffer.ensure_allocated()
    except OSError as error:  # what a mapping that is too large is to the system
        if error.errno != errno.ENOMEM: raise
        raise MemoryError(str(error)) from error


def allocate_arena(tensors: Sequence[Tensor]) -> None:
    """Memory for empty tensors of one device. On the CPU it is one private mapping of huge pages, where the
    system has them: filling it then takes a page fault each 2 MiB instead of each 4 KiB (half of the time
    to load a model).
    """
    if not tensors or not str(tensors[0].device).startswith("CPU") or not hasattr(mmap, "MADV_HUGEPAGE"):
        for tensor in tensors: allocate(tensor)
        return
    offsets = list(accumulate((-(-int(t.nbytes()) // ALIGNMENT) * ALIGNMENT for t in tensors), initial=0))
    mapping = mmap.mmap(-1, max(offsets[-1], 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # not every kernel has transparent huge pages
    with contextlib.suppress(OSError): mapping.madvise(mmap.MADV_HUGEPAGE)
    arena = np.frombuffer(mapping, np.uint8)
    for tensor, offset in zip(tensors, offsets, strict=False):
        buffer = cast(Buffer, tensor.uop.buffer)
        assert not buffer.is_allocated(), "an arena is for empty tensors"
        address, size = arena.ctypes.data + offset, buffer.nbytes
        buffer.options = FREED_AT_ONCE
        # meta keeps the mapping: it lives as long as any buffer in it
        view = MMIOInterface(address, size, fmt="B")
        buffer.allocate(opaque=HCQBuffer(address, size, meta=arena, view=view, owner=Device[buffer.device]))


def sweep() -> None:
    """Drops what tinygrad keeps of models that are gone, some 20 KB for each that was opened: weak references
    to tensors that a collection of cycles took, and tables of plans of memory."""
    for ref in list(all_tensors):
        if ref() is None: all_tensors.pop(ref, None)
    for table in (TLSFAllocator.lv1, TLSFAllocator.lv2): cast(Any, table).cache_clear()


def host_bytes(tensor: Tensor) -> memoryview | None:
    """The tensor's memory as writable bytes, or None where the host cannot address it."""
    buffer = allocate(tensor)
    if not hasattr(buffer.allocator, "_as_buffer"): return None
    Device[buffer.device].synchronize()
    # through numpy: ctypes views have format "<B", which memoryview assignment does not take for "B"
    return np.frombuffer(buffer.as_memoryview(force_zero_copy=True), np.uint8).data


def write(tensor: Tensor, offset: int, data: memoryview) -> None:
    """Copies `data` to byte `offset` of the tensor's memory."""
    if (view := host_bytes(tensor)) is not None:
        view[offset:offset + len(data)] = data
        return
    with _copying:
        buffer = allocate(tensor).view(len(data), dtypes.uint8, offset).ensure_allocated()
        buffer.allocator._copyin(buffer._buf, data)
        Device[buffer.device].synchronize()  # devices keep a pinned copy of `data` until then


def read(tensor: Tensor, dtype: npt.DTypeLike) -> np.ndarray:
    """The tensor's elements as a flat array of `dtype`: a view where the host can address it, else a copy."""
    if (view := host_bytes(tensor)) is not None: return np.frombuffer(view, dtype)
    return tensor.numpy().reshape(-1)


def read_part(tensor: Tensor, offset: int, size: int) -> bytearray:
    """A copy of so many bytes of the tensor's memory from byte `offset` on."""
    made = bytearray(size)
    read_into(tensor, offset, memoryview(made))
    return made


def read_into(tensor: Tensor, offset: int, target: memoryview) -> None:
    """Fills `target` with bytes of the tensor's memory from byte `offset` on."""
    if (view := host_bytes(tensor)) is not None:
        target[:] = view[offset:offset + len(target)]
        return
    with _copying:
        buffer = allocate(tensor).view(len(target), dtypes.uint8, offset).ensure_allocated()
        buffer.allocator._copyout(target, buffer._buf)


def discards(device: str) -> bool:
    """Whether `discard` can give back memory of a device's tensors."""
    return device.partition(":")[0] == "CPU" and sys.platform == "linux"


def discard(tensors: Sequence[Tensor]) -> None:
    """Gives the system the memory of tensors back, but for pages that they share with others. Their addresses
    stay: what is read there is 0 until it is written."""
    system, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    for tensor in tensors:
        memory = host_bytes(tensor)
        assert memory is not None, "memory of a device that is not the host's"
        begin = np.frombuffer(memory, np.uint8).ctypes.data
        first, end = -(-begin // page), (begin + len(memory)) // page
        if first >= end: continue
        pages = ctypes.c_void_p(first * page), ctypes.c_size_t((end - first) * page)
        # shared ones, as tinygrad maps small buffers, are the system's until they are removed
        if not system.madvise(*pages, mmap.MADV_REMOVE): continue
        if system.madvise(*pages, mmap.MADV_DONTNEED): raise OSError(ctypes.get_errno(), "madvise")


def resident_bytes() -> int:
    """Peak resident set of this process so far, in bytes; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # not ru_maxrss: a process begins with that of the one that started it
        lines = status.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0) * 1024
    with contextlib.suppress(ImportError):
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 0
