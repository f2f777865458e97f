"""Page-locked memory of the emulated driver, and the work that owns its bytes.

Protocol: bytes belong to an `Upload` or a `Download` from its submission until the host knows that it is done
(order.py: `Timeline.complete`). A download's bytes are poison until then. An upload's must be, when
it is known to be done, what they were when it was submitted: others were written too early, which is said at
the call that makes it known. Work that comes after a download, on the device, sees what it brought.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import driver

POISON = 0xff       # NaN of every floating-point type, and -1


@dataclass(eq=False)
class Owned:
    """Bytes from `offset` on that work at `position` of its stream owns: those that an upload read, or that a
    download brings."""
    memory: EmulatedHostMemory
    position: int
    offset: int
    data: np.ndarray
    download: bool
    what: str

    @property
    def stop(self) -> int: return self.offset + len(self.data)

    def complete(self) -> list[str]:
        """The work is known to be done: delivers, or says what is wrong."""
        if self not in self.memory.owned: return []     # freed, or found wrong before
        now = self.memory.bytes(self.offset, self.stop)
        self.memory.owned.remove(self)
        if self.download:
            self.memory.deliver(self)
            return []
        if (same := now == self.data).all(): return []
        first = self.offset + int(same.argmin())
        return [f"host: byte {first} of page-locked memory was written while {self.what} owned it: record an "
                f"event after the upload, and wait_for it before the memory is written again"]


class EmulatedHostMemory(driver.HostMemory):
    """Bytes of the host. Before they are given back `finish` does what the device has kept for later."""

    def __init__(self, nbytes: int, finish: Callable[[], None] = lambda: None) -> None:
        self.finish = finish
        if nbytes <= 0: raise DriverError(f"an allocation of {nbytes} bytes", "a size above 0")
        self.view = np.full(nbytes, POISON, np.uint8).data
        self.owned: list[Owned] = []     # in order of submission

    def free(self) -> None:
        self.finish()
        self.view = memoryview(b"")
        self.owned.clear()

    def array(self, start: int, stop: int) -> np.ndarray:
        """Returns these bytes of the view. Raises `DriverError` when they are not there."""
        if not 0 <= start <= stop <= len(self.view):
            raise DriverError(f"bytes {start} to {stop} of page-locked memory", f"of its {len(self.view)}")
        return np.frombuffer(self.view, np.uint8)[start:stop]

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """A copy of these bytes as work submitted now sees them."""
        out = self.array(start, stop).copy()
        for each in self.owned:
            low, high = max(start, each.offset), min(stop, each.stop)
            if each.download and low < high:
                out[low - start:high - start] = each.data[low - each.offset:high - each.offset]
        return out

    def lend(self, owned: Owned) -> list[str]:
        """Bytes belong to work from now on. A download's become poison; uploads of them are looked at before
        that."""
        found = []
        if owned.download:
            for each in list(self.owned):
                if not each.download and each.offset < owned.stop and owned.offset < each.stop:
                    found += each.complete()
            self.array(owned.offset, owned.stop)[:] = POISON
        self.owned.append(owned)
        return found

    def deliver(self, owned: Owned) -> None:
        """The bytes of a download, but for those that a later one will bring."""
        self.array(owned.offset, owned.stop)[:] = owned.data
        for each in self.owned:
            if each.download: self.array(each.offset, each.stop)[:] = POISON


def host_memory(memory: driver.HostMemory) -> EmulatedHostMemory:
    """The memory of an upload or a download."""
    if isinstance(memory, EmulatedHostMemory): return memory
    raise DriverError(f"page-locked memory that is a {type(memory).__name__}",
                      "what host() of an emulated device gave")
