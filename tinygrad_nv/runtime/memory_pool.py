"""Accounts for device memory by label, and limits how much of it this process holds.

Protocol: `MemoryPool(driver)` is what an allocator of ours takes memory through. Each allocation has the
label that `label_allocations` set around it, "tensors" without one; `report()` says what each label holds.
Memory that is given back goes to the driver at once, which hands it on in the order of its streams
(cuMemAllocAsync); nothing is kept above the driver.

An allocation beyond `limit`, or one that the driver refuses, first gives back what is not needed: garbage,
what callbacks of `on_pressure` let go, what the driver keeps. Then it is an `OutOfMemoryError`: what was
asked, what is held, what would help.

One thread allocates at a time, as with tinygrad's allocators. `free` may be called by finalizers, in any
thread and in the middle of `alloc`: no lock is held, and each counter changes by one `+=`.
"""
from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from tinygrad import Device, GlobalCounters

from tinygrad_nv.errors import OutOfMemoryError, RequestError
from tinygrad_nv.runtime.driver import Driver, HostMemory
from tinygrad_nv.runtime.observe.memory_report import Holding, LabelUsage, MemoryReport, human, shortage

UNLABELLED = "tensors"
LARGEST = 5             # single allocations that a report names
UTILIZATION = 0.9       # of the device's memory, what a language model may hold by default

T = TypeVar("T")
_label: ContextVar[str] = ContextVar("label of allocations", default=UNLABELLED)


@contextmanager
def label_allocations(name: str) -> Iterator[None]:
    """Allocations inside are `name`'s in reports, whatever is around it; also those that tinygrad makes."""
    token = _label.set(name)
    try: yield
    finally: _label.reset(token)


@dataclass(eq=False, slots=True)
class _Tally:
    """Usage of a label: bytes and allocations now, and the most bytes it ever held."""
    nbytes: int = 0
    count: int = 0
    peak: int = 0


class MemoryPool:
    """The memory of one device as this process uses it. `limit` is the most bytes it may hold, by default all
    there are, what the driver keeps for it included; `name` is the device's, for messages."""

    def __init__(self, driver: Driver, limit_bytes: int | None = None, name: str = "") -> None:
        self.driver, self.name = driver, name or driver.properties.name
        self.total = driver.properties.memory_bytes
        self.limit = self.total if limit_bytes is None else min(limit_bytes, self.total)
        self.live_bytes = self.peak_bytes = 0
        self._held: dict[int, Holding] = {}
        self._tallies: dict[str, _Tally] = {}
        self._made = 0      # allocations so far
        self._taken = 0     # held, and at most what the driver keeps besides
        self._reclaimers: list[Callable[[int], object]] = []
        self._remedies: dict[str, Callable[[int], str]] = {}

    # **** memory ****

    def alloc(self, nbytes: int) -> int:
        """Address of new memory, as `Driver.alloc`. Raises `OutOfMemoryError`."""
        try: address = self._take(nbytes)
        except MemoryError: address = 0
        if not address: address = self._after_relief(lambda: self._take(nbytes), nbytes, _label.get())
        name = _label.get()
        if (tally := self._tallies.get(name)) is None: tally = self._tallies.setdefault(name, _Tally())
        self._made += 1
        self._held[address] = Holding(name, nbytes, self._made)
        self.live_bytes += nbytes
        tally.nbytes += nbytes
        tally.count += 1
        if tally.nbytes > tally.peak: tally.peak = tally.nbytes
        if self.live_bytes > self.peak_bytes: self.peak_bytes = self.live_bytes
        return address

    def free(self, address: int) -> None:
        """Gives back what `alloc` returned, as `Driver.free`."""
        held = self._held.pop(address, None)  # before the address can be another's
        self.driver.free(address)  # an address that was never ours is refused here
        if held is None: return
        tally = self._tallies[held.label]
        self.live_bytes -= held.nbytes
        tally.nbytes -= held.nbytes
        tally.count -= 1

    def allocation(self, address: int) -> int:
        """Returns where the allocation begins that an address is in; the address itself of memory that is not
        ours."""
        if address in self._held: return address
        found = max((each for each in self._held if each <= address), default=address)
        return found if found in self._held and address < found + self._held[found].nbytes else address

    def host(self, nbytes: int) -> HostMemory:
        """Page-locked memory, as `Driver.host`; it is no memory of the device, and in no report. Raises
        `OutOfMemoryError`."""
        with page_locking(nbytes): return self.driver.host(nbytes)

    def retry_relieved(self, action: Callable[[], T], what: str) -> T:
        """Returns what `action` returns, for which the driver takes memory by itself: code, a graph. Where it
        has none, what is not needed is given back first, as for an allocation. Raises `OutOfMemoryError`."""
        try: return action()
        except MemoryError: pass
        return self._after_relief(action, 0, what)

    def _take(self, nbytes: int) -> int:
        if self.live_bytes + nbytes > self.limit: raise MemoryError("beyond the limit")
        if self._taken + nbytes > self.limit: self._look_at_kept(nbytes)
        address = self.driver.alloc(nbytes)
        self._taken += nbytes
        return address

    def _look_at_kept(self, nbytes: int) -> None:
        """Counts what the driver keeps, and has it given back where that and what is held is over the limit.
        Asked for as seldom as `_taken` allows: it is two calls of the driver. Where what is kept is of the
        wrong sizes, this allocation may still go over the limit, and the next one finds that."""
        if self.live_bytes + max(kept := self.driver.slack_bytes(), nbytes) > self.limit:
            self.driver.trim()
            kept = self.driver.slack_bytes()
        self._taken = self.live_bytes + kept

    def _after_relief(self, action: Callable[[], T], nbytes: int, what: str) -> T:
        """Tries again after each thing that may give memory back. The error has no other one behind it: that
        one's frames would hold, until garbage is collected, what the caller lets go of."""
        for relieve in (_collect, *self._reclaimers):
            relieve(nbytes)
            self.driver.trim()
            try: return action()
            except MemoryError as error: refusal = str(error)
        raise self.out_of_memory(nbytes, what, refusal)

    # **** limit ****

    def use_at_most(self, utilization: float) -> None:
        """Sets the limit to this part of the device's memory, 0 < utilization <= 1: all that this process
        may hold."""
        self.limit = int(check_utilization(utilization) * self.total)

    def require(self, sizes: dict[str, int]) -> None:
        """Refuses, with the words of an allocation that fails, what will not fit: bytes by label that are
        about to be allocated."""
        asked = sum(sizes.values())
        room = min(self.limit - self.live_bytes, self.driver.memory()[0])
        if asked > room: raise self.out_of_memory(asked, " and ".join(sizes), "", sizes)

    def on_pressure(self, reclaim: Callable[[int], object]) -> Callable[[], None]:
        """Has `reclaim(nbytes)` called before an allocation of `nbytes` fails, to free what it can do
        without; returns a function that ends this, also when it is called again."""
        self._reclaimers.append(own := lambda nbytes: reclaim(nbytes))

        def stop() -> None:
            if own in self._reclaimers: self._reclaimers.remove(own)

        return stop

    def remedy(self, label: str, advice: Callable[[int], str]) -> None:
        """Has `advice(nbytes)` say how `label` could hold so many bytes fewer; "" where it cannot. The last
        one for a label counts."""
        self._remedies[label] = advice

    # **** words ****

    def report(self) -> MemoryReport:
        """The breakdown by label now."""
        shares = [LabelUsage(name, t.nbytes, t.count, t.peak) for name, t in list(self._tallies.items())]
        largest = heapq.nsmallest(LARGEST, list(self._held.values()), lambda one: (-one.nbytes, one.number))
        free, total = self.driver.memory()
        kept = min(self.driver.slack_bytes(), free)
        shares.sort(key=lambda share: (-share.nbytes, -share.peak_bytes, share.label))
        return MemoryReport(self.name, tuple(shares), tuple(largest), self.live_bytes, self.peak_bytes, kept,
                            max(0, total - free - self.live_bytes), free - kept, total, self.limit)

    def out_of_memory(self, nbytes: int, label: str, refusal: str = "",
                      sizes: dict[str, int] | None = None) -> OutOfMemoryError:
        """The error for `nbytes` that cannot be had; `refusal` is what the driver said, `sizes` what the
        bytes are for where they are for several things."""
        return shortage(self.report(), nbytes, label, refusal, sizes or {label: nbytes}, self._remedies)


def memory_report(device: str | None = None) -> MemoryReport:
    """The breakdown of a device's memory by label; tinygrad's default device when None."""
    opened = Device[device or Device.DEFAULT]
    if isinstance(pool := getattr(opened, "pool", None), MemoryPool): return pool.report()
    held = GlobalCounters.mem_used_per_device[opened.device]
    return MemoryReport(opened.device, (), (), held, held, 0, 0, 0, 0, 0)


@contextmanager
def page_locking(nbytes: int) -> Iterator[None]:
    """Inside, the host is asked for page-locked memory: a MemoryError is an `OutOfMemoryError`."""
    try: yield
    except MemoryError as error:
        name = _label.get()
        raise OutOfMemoryError(f"out of page-locked memory: {human(nbytes)} asked for {name} ({error})",
                               "memory of the host that can be locked",
                               "end processes that use much of the host's memory, or raise what may be "
                               "locked (ulimit -l)", nbytes, name) from None


def check_utilization(value: float) -> float:
    """`--gpu-memory-utilization`, or a `RequestError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise RequestError(f"gpu_memory_utilization is {value}",
                           "a part of the GPU's memory: above 0, at most 1",
                           f"change --gpu-memory-utilization; {UTILIZATION} is the default")
    return float(value)


def _collect(_: int) -> None: gc.collect()
