"""Times a spec's kernels on a device.

Protocol: `DriverClock(driver)` is a `tile.clock.Clock`. Operands are zeros, but for integers that are places
of something else (tile/arguments.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.runtime.driver import Driver, Fill, Launch, integer, map_spec, pointer
from tinygrad_nv.runtime.observe.telemetry import Telemetry
from tinygrad_nv.tile.arguments import integers, launches
from tinygrad_nv.tile.clock import Conditions, How
from tinygrad_nv.tile.kernel import TileKernel

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly

WARM, TIMED = 3, 11                 # calls
UNHELD = ("idle", "application clocks are set")     # of NVML's reasons: neither power nor heat


@dataclass(frozen=True)
class DriverClock:
    """The GPU that a driver drives. `watch` opens its telemetry, when a candidate is timed first; None: it is
    not watched. `held_back` has NVML's reasons for lower clocks while candidates ran."""
    driver: Driver
    watch: Callable[[], Telemetry] | None = None
    held_back: set[str] = field(default_factory=set, compare=False)
    how: ClassVar[How] = "measured"

    @cached_property
    def telemetry(self) -> Telemetry | None:
        """The GPU's telemetry; None where NVML cannot tell which GPU it is, which fails no program."""
        try: return None if self.watch is None else self.watch()
        except DriverError: return None

    @property
    def clusters(self) -> Clusters: return self.driver.clusters

    def seconds(self, made: Any, spec: Any, assembled: Sequence[Assembly] = ()) -> float:
        """Returns the seconds that `driver_seconds` measures."""
        return seconds(self.driver, made, spec, assembled, self._look)

    def conditions(self) -> Conditions:
        """Returns those of what was timed since this was asked last; nothing of a GPU that is not watched."""
        if self.telemetry is None or not self.telemetry.available: return {}
        throttled = bool(self.held_back)
        self.held_back.clear()
        return {"driver": self.telemetry.driver_version, "throttled": throttled}

    def _look(self) -> None:
        """Asks why clocks are low while a candidate runs."""
        if self.telemetry is None: return
        self.held_back.update(each for each in self.telemetry.throttle_reasons() if each not in UNHELD)


def seconds(driver: Driver, made: Any, spec: Any, assembled: Sequence[Assembly] = (),
            look: Callable[[], None] = lambda: None) -> float:
    """The median of some calls of what a template built, after some that are not counted. `look` is called
    while they run."""
    held: list[int] = []

    def alloc(nbytes: int, contents: np.ndarray | None) -> int:
        held.append(driver.alloc(nbytes))
        driver.submit(Fill(held[-1], 0, nbytes))
        if contents is not None: driver.copy_in(held[-1], memoryview(contents.view(np.uint8).data))
        return held[-1]
    try:
        works, zeroed = list[Launch](), list[Fill]()
        for number, (kernel, order) in enumerate(launches(made, spec, alloc)):
            image = assembled[number].cubin if assembled else kernel.ptx.encode()
            zeroed += [Fill(order[each.pointer], 0, each.nbytes) for each in kernel.zeroed]
            works.append(Launch(driver.load(image).function(kernel.name), kernel.grid, kernel.block,
                                arguments(driver, kernel, integers(spec), order), kernel.dynamic_smem,
                                (*kernel.cluster, 1, 1)[:3]))
        return _median(driver, works, zeroed, look)
    finally:
        driver.synchronize()
        for address in held: driver.free(address)


def arguments(driver: Driver, kernel: TileKernel, values: Sequence[int],
              addresses: Sequence[int]) -> tuple[bytes, ...]:
    """A launch's, of buffers in the order of the pointers."""
    maps = [map_spec(one, addresses[one.pointer], values[one.integer] if one.dynamic >= 0 else 0)
            for one in kernel.maps]
    return (*map(pointer, addresses), *map(integer, values), *map(driver.tensor_map, maps))


def _median(driver: Driver, works: Sequence[Launch], zeroed: Sequence[Fill],
            look: Callable[[], None]) -> float:
    """Returns the median of the calls, with what has to be zero set before each outside the time."""
    times = []
    for number in range(WARM + TIMED):
        for fill in zeroed: driver.submit(fill)
        start, end = driver.event(), driver.event()
        driver.record(start)
        for launch in works: driver.submit(launch)
        driver.record(end)
        look()
        driver.wait_for(end)
        if number >= WARM: times.append(driver.ms_between(start, end) / 1e3)
    return sorted(times)[TIMED // 2]
