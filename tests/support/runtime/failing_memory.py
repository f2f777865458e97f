"""Memory that runs out at a chosen allocation, and what must hold then.

Protocol: in `failing(driver, n)` the n-th allocation of device or page-locked memory is refused, and with
`lasting` all after it, also those that the pool tries again. `every_allocation` runs a program with each of
its allocations refused in turn: it raises `OutOfMemoryError`, holds nothing afterwards that it did not hold
before, and gives the right answer when it is run again.
"""
from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tinygrad_nv import Device
from tinygrad_nv.errors import OutOfMemoryError
from tinygrad_nv.runtime.driver import Driver, HostMemory


class Refusals:
    """Allocations so far, how many of them were refused, and the page-locked ones."""

    def __init__(self) -> None:
        self.made = self.refused = 0
        self.hosts: list[HostMemory] = []


@contextmanager
def failing(driver: Driver, n: int, lasting: bool = True) -> Iterator[Refusals]:
    """Counts allocations from 1 and refuses the n-th."""
    count = Refusals()

    def guarded(allocate: Callable) -> Callable:
        def call(nbytes: int) -> object:
            count.made += 1
            if count.made == n or (lasting and count.made > n):
                count.refused += 1
                raise MemoryError(f"allocation {count.made} is refused")
            memory = allocate(nbytes)
            if isinstance(memory, HostMemory): count.hosts.append(memory)
            return memory
        return call

    driver.alloc, driver.host = guarded(driver.alloc), guarded(driver.host)
    try: yield count
    finally: del driver.alloc, driver.host


@contextmanager
def finalized() -> Iterator[list[str]]:
    """What finalizers raise, which Python only prints."""
    said: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda args: said.append(repr(args.exc_value))
    try: yield said
    finally: sys.unraisablehook = before


def holdings(device: str) -> dict[str, tuple[int, int]]:
    """Bytes and allocations by label that are held when all garbage is gone."""
    gc.collect()
    pool = Device[device].pool
    held = {share.label: (share.nbytes, share.count) for share in pool.report().labels if share.count}
    assert Device[device].driver.used_bytes == pool.live_bytes == sum(nbytes for nbytes, _ in held.values())
    return held


def every_allocation(program: Callable[[], np.ndarray], device: str = "EMU", step: int = 1,
                     again: bool = True) -> int:
    """How many allocations of `program`, every `step`-th of them, were refused, each in a run of its own."""
    driver = Device[device].driver
    wanted = program()  # kernels are compiled and loaded now: they stay
    before = holdings(device)
    for n in range(1, 1_000_000, step):
        with finalized() as said:
            with failing(driver, n) as count:
                try: found = program()
                except OutOfMemoryError as error: found, words = None, str(error)
            assert holdings(device) == before, f"allocation {n}"
        assert not said, f"allocation {n}: {said[0]}"
        if found is not None:
            assert not count.refused, f"allocation {n} was refused, and no error was raised"
            np.testing.assert_array_equal(found, wanted)
            return (n - 1 + step - 1) // step
        assert "out of " in words
        assert not any(memory.view.nbytes for memory in count.hosts), f"page-locked, allocation {n}"
        Device[device].synchronize()
        if again: np.testing.assert_array_equal(program(), wanted)
    raise AssertionError("a program without end")
