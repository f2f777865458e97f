"""One tinygrad device over the driver interface.

Protocol: `NVDevice(name, driver)` is a `Compiled` of tinygrad: an allocator whose buffers are addresses
in its pool (memory_pool.py), a program that launches (program.py), a graph that replays what
TinyJit captured (graph.py).
`EMUDevice`, which `DEV=EMU` opens, is that over the emulator, for the architecture EMU_ARCH; EMU_CHECK=0 runs
it without race and initialisation checks.

What a kernel did wrong is raised when something waits for it: when a tensor is read, at `synchronize()`, or
at once with DEBUG=2.

Of its memory a buffer is an address, a view is an address inside it. Memory comes
from, and goes back to, the device's `MemoryPool` at once: tinygrad's list of freed buffers (LRU) is not used.
It would hold memory back in pieces of sizes that may never be asked for again, and hand it on without asking
which stream still works with it. On the emulator it would also hide reads of memory that was given back, and
of new memory that was never written.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinygrad.device import Allocator, BufferSpec
from tinygrad.helpers import BEAM, getenv, suppress_finalizing
from tinygrad.renderer import Renderer

from tinygrad_nv import config
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import Copy, Driver, Fill
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.runtime.memory_pool import MemoryPool, page_locking
from tinygrad_nv.runtime.program import NVProgram
from tinygrad_nv.runtime.ptx_renderer import PTXRenderer

if TYPE_CHECKING:
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver


class NVAllocator(Allocator[DrivenDevice]):
    """Buffers are addresses; a view is an address too."""

    def alloc(self, size: int, options: BufferSpec | None = None) -> int:
        # tinygrad's own would put its words in place of an OutOfMemoryError
        return self._alloc(size, options or self.default_buffer_spec)

    def _alloc(self, size: int, options: BufferSpec) -> int:
        if options.external_ptr: return options.external_ptr
        address = self.dev.pool.alloc(size)
        # BEAM times its candidates on memory that was never written
        if options.zero or BEAM or getenv("JITBEAM"): self.dev.driver.submit(Fill(address, 0, size))
        return address

    @suppress_finalizing
    def _free(self, opaque: int, options: BufferSpec) -> None:
        if not options.external_ptr: self.dev.pool.free(opaque)

    def _copyin(self, dest: int, src: memoryview) -> None:
        with page_locking(len(src)): self.dev.driver.copy_in(dest, src)

    def _copyout(self, dest: memoryview, src: int) -> None:
        self.dev.driver.copy_out(dest, src)
        self.dev.check()

    def _transfer(self, dest: int, src: int, sz: int, src_dev: DrivenDevice, dest_dev: DrivenDevice) -> None:
        copy = Copy(dest, src, sz)
        if src_dev is dest_dev: dest_dev.driver.submit(copy)
        else: dest_dev.driver.copy_peer(copy, src_dev.driver)

    def _offset(self, buf: int, size: int, offset: int) -> int: return buf + offset


class NVDevice(DrivenDevice):
    """A device of tinygrad over `driver`."""

    def __init__(self, device: str, driver: Driver,
                 renderers: Sequence[type[Renderer]] = (PTXRenderer,)) -> None:
        self.driver, self.pool = driver, MemoryPool(driver, name=device)
        super().__init__(device, NVAllocator(self), list(renderers), NVProgram, NVGraph,
                         arch=driver.properties.arch.rstrip("a"))


class EMUDevice(NVDevice):
    """`DEV=EMU`: the emulator as a device."""
    driver: EmulatedDriver

    def __init__(self, device: str) -> None:
        # numpy, the parser and the emulator are loaded only where it is used
        from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
        number = device.partition(":")[2]
        ordinal = int(number) if number.isdecimal() else 0
        driver = EmulatedDriver(str(config.get("EMU_ARCH")), bool(config.get("EMU_CHECK")),
                                step_limit=int(config.get("EMU_STEP_LIMIT")), ordinal=ordinal)
        super().__init__(device, driver)
