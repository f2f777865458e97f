"""Memory of a device of tinygrad over the driver interface.

Protocol: allocators of tinygrad. A buffer is an address, a view is an address inside it.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from tinygrad.device import Allocator, BufferSpec, LRUAllocator
from tinygrad.helpers import BEAM, getenv, suppress_finalizing

from tinygrad_nv.runtime.driver import Copy, Fill

if TYPE_CHECKING:
    from tinygrad_nv.runtime.device import NVDevice


class NVAllocator(LRUAllocator["NVDevice"]):
    """Buffers are addresses; a view is an address too."""

    def _alloc(self, size: int, options: BufferSpec) -> int:
        if options.external_ptr: return options.external_ptr
        address = self.dev.driver.alloc(size)
        # BEAM times its candidates on memory that nobody wrote
        if options.zero or BEAM or getenv("JITBEAM"): self.dev.driver.submit(Fill(address, 0, size))
        return address

    @suppress_finalizing
    def _free(self, opaque: int, options: BufferSpec) -> None:
        if not options.external_ptr: self.dev.driver.free(opaque)

    def _copyin(self, dest: int, src: memoryview) -> None: self.dev.driver.copy_in(dest, src)

    def _copyout(self, dest: memoryview, src: int) -> None: self.dev.driver.copy_out(dest, src)

    def _transfer(self, dest: int, src: int, sz: int, src_dev: NVDevice, dest_dev: NVDevice) -> None:
        copy = Copy(dest, src, sz)
        if src_dev is dest_dev: dest_dev.driver.submit(copy)
        else: dest_dev.driver.copy_peer(copy, src_dev.driver)

    def _offset(self, buf: int, size: int, offset: int) -> int: return buf + offset


class EMUAllocator(NVAllocator):
    """Keeps nothing for later: reads of memory that was given back, and of new memory that nobody wrote, are
    found."""

    def alloc(self, size: int, options: BufferSpec | None = None) -> int:
        return Allocator.alloc(self, size, options)

    def free(self, opaque: int, size: int, options: BufferSpec | None = None) -> None:
        Allocator.free(self, opaque, size, options)
