"""One tinygrad device over the driver interface.

Protocol: `NVDevice(name, driver)` is a `Compiled` of tinygrad: an allocator whose buffers are addresses
(allocator.py) in its pool (memory_pool.py), a program that launches (program.py), a graph that replays what
TinyJit captured (graph.py).
`EMUDevice`, which `DEV=EMU` opens, is that over the emulator, for the architecture EMU_ARCH; EMU_CHECK=0 runs
it without race and initialisation checks.

What a kernel did wrong is raised when something waits for it: when a tensor is read, at `synchronize()`, or
at once with DEBUG=2.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinygrad.renderer import Renderer

from tinygrad_nv import config
from tinygrad_nv.runtime.allocator import NVAllocator
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.runtime.memory_pool import MemoryPool
from tinygrad_nv.runtime.program import NVProgram
from tinygrad_nv.runtime.ptx_renderer import PTXRenderer

if TYPE_CHECKING:
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver


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
