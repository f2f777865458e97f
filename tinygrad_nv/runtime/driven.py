"""A device of tinygrad over the driver interface, without what it is made of (device.py)."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tinygrad.device import Compiled

from tinygrad_nv.errors import NVError
from tinygrad_nv.runtime.driver import Driver, Stream, Window
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.runtime.memory_pool import MemoryPool


class DrivenDevice(Compiled):
    """Device as allocators, programs and graphs use it. `window` is what launches keep in L2 (l2.py). An
    `observer`, given a program and its works, submits eager launches in the device's place, and may return
    the seconds they took (observe/timeline.py)."""
    driver: Driver
    pool: MemoryPool
    window: Window | None = None
    observer: Callable[..., float | None] | None = None

    @functools.cached_property
    def calls(self) -> Stream:
        """The stream of calls of libraries."""
        return self.driver.stream()

    @functools.cached_property
    def addresses_in_use(self) -> set[int]:
        """Addresses where the allocations begin that calls use which stream 0 does not wait for yet."""
        return set()

    def call(self, work: LibraryCall) -> None:
        """Puts a call of a library into a stream of its own, after all that stream 0 holds. Kernels that use
        other memory run beside it, everything else comes after it."""
        driver, needs, done = self.driver, self.driver.event(), self.driver.event()
        if driver.beside is None: self.addresses_in_use.clear()
        driver.record(needs, driver.stream_0)
        driver.wait(needs, self.calls)
        driver.submit(work, self.calls)
        driver.record(done, self.calls)
        driver.beside = done
        work.given(done, False)
        self.addresses_in_use.update(self.pool.allocation(address) for address,
                                     _ in (*work.reads, *work.writes))

    def stream_for(self, buffers: Sequence[int]) -> Stream | None:
        """Stream 0 for a kernel with these buffers: itself if it may run beside calls of libraries."""
        if self.driver.beside is None: return None
        if not self.addresses_in_use.isdisjoint(map(self.pool.allocation, buffers)): return None
        return self.driver.stream_0

    @functools.cached_property
    def together(self) -> dict[Hashable, Any]:
        """Groups that this device, as the first, has with others: they are closed with it (together.py)."""
        return {}

    def finalize(self) -> None:
        for each in self.together.values():
            with contextlib.suppress(NVError): each.close()     # of a device whose kernels have failed
        self.together.clear()
        super().finalize()

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

    def submit_timed(self, submit: Callable[[], Any], wait: bool) -> float | None:
        """Submits; with `wait`, returns the seconds it took on the device."""
        if not wait:
            submit()
            return None
        start, end = self.driver.event(), self.driver.event()
        self.driver.record(start)
        submit()
        self.driver.record(end)
        self.driver.wait_for(end)
        return self.driver.ms_between(start, end) * 1e-3
