"""Large buffers of the CPU begin at huge pages and are otherwise as tinygrad's."""
from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Device, Tensor
from tinygrad.device import Buffer
from tinygrad.dtype import dtypes
from tinygrad.runtime import ops_cpu

import tinygrad_nv
from tinygrad_nv.runtime.cpu import device as cpu_device
from tinygrad_nv.runtime.cpu.memory import PAGE


def buffer(nbytes: int) -> Buffer:
    """Newly allocated: none that was freed before, of the same size, and kept."""
    Device["CPU"].allocator.free_cache()
    return Buffer("CPU", nbytes, dtypes.uint8).allocate()


def write(made: Buffer, data: np.ndarray) -> None: made.as_memoryview(force_zero_copy=True)[:] = data.data


def asked(address: int) -> bool:
    """Whether the mapping around an address is private and asks for huge pages."""
    inside, text = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            first, last = (int(word, 16) for word in words[0].split("-"))
            inside, text = first <= address < last, words[1]
        elif inside and words[0] == "VmFlags:": return text == "rw-p" and "hg" in words
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("nbytes", [PAGE, PAGE + 1, 5 * PAGE - 8])
def test_a_large_buffer_asks_for_huge_pages(nbytes: int):
    made = buffer(nbytes)
    address = made._buf.va_addr
    assert address % PAGE == 0
    assert asked(address)
    assert asked(address + nbytes - 1)
    assert made._buf.size == nbytes
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    write(made, data)
    np.testing.assert_array_equal(np.frombuffer(made.as_memoryview(), np.uint8), data)


def test_a_small_buffer_and_an_external_one_are_tinygrads():
    assert not asked(buffer(PAGE - 1)._buf.va_addr)
    theirs = mmap.mmap(-1, 2 * PAGE)
    address = np.frombuffer(theirs, np.uint8).ctypes.data
    shown = Tensor.from_blob(address, (2 * PAGE,), dtype=dtypes.uint8, device="CPU")
    assert shown.uop.base.realized.get_buf("CPU").va_addr == address


def test_disabled_is_tinygrads_own_memory():
    with tinygrad_nv.disabled(): assert not asked(buffer(7 * PAGE)._buf.va_addr)


def test_where_there_are_no_huge_pages_memory_is_private_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # advice that no kernel knows, as one without huge pages
    with pytest.raises(OSError, match="Invalid argument"): mmap.mmap(-1, PAGE).madvise(-1)
    made = buffer(3 * PAGE)
    assert not asked(made._buf.va_addr)
    write(made, np.full(3 * PAGE, 7, np.uint8))
    assert bytes(made.as_memoryview()[-3:]) == b"\7\7\7"


def test_the_class_of_allocators_is_put_back():
    ours = ops_cpu.CPUAllocator
    tinygrad_nv.hooks.remove_cpu()
    try: assert ops_cpu.CPUAllocator is ours.__mro__[1] is not ours
    finally: cpu_device.install()
