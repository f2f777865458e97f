"""A device of tinygrad over the driver interface, without what it is made of (device.py)."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tinygrad.device import Compiled

from tinygrad_nv.runtime.driver import Driver, Window
from tinygrad_nv.runtime.memory_pool import MemoryPool


class DrivenDevice(Compiled):
    """What allocators, programs and graphs use of their device. `window` is what launches keep in L2 (l2.py).
    An `observer`, given a program and its works, submits eager launches in the device's place, and may return
    the seconds they took (observe/timeline.py)."""
    driver: Driver
    pool: MemoryPool
    window: Window | None = None
    observer: Callable[..., float | None] | None = None

    @functools.cached_property
    def checks(self) -> list[Callable[[], None]]:
        """Called when the host has waited for the device: they raise what libraries have failed in."""
        return []

    def check(self) -> None:
        """Raises what a library has failed in."""
        for each in self.checks: each()

    def synchronize(self) -> None:
        self.driver.synchronize()
        self.check()

    def timed(self, submit: Callable[[], Any], wait: bool) -> float | None:
        """Submits; with `wait`, returns the seconds it took on the device."""
        if not wait:
            submit()
            return None
        start, end = self.driver.event(), self.driver.event()
        self.driver.record(start)
        submit()
        self.driver.record(end)
        self.driver.wait_for(end)
        return self.driver.elapsed_ms(start, end) * 1e-3
