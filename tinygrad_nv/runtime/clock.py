"""Times a matmul's kernel on a device.

Protocol: `DriverClock(driver)` is a `tile.clock.Clock`. Operands are zeros.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.runtime.driver import Driver, Fill, Launch, integer, map_spec, pointer
from tinygrad_nv.tile.gemm.spec import GemmSpec, sizes
from tinygrad_nv.tile.kernel import GemmKernel

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly

WARM, TIMED = 3, 11                 # launches


@dataclass(frozen=True)
class DriverClock:
    """The GPU that a driver drives."""
    driver: Driver

    @property
    def clusters(self) -> Clusters: return self.driver.clusters

    def seconds(self, kernel: GemmKernel, spec: GemmSpec, made: Assembly | None = None) -> float:
        """As the function."""
        return seconds(self.driver, kernel, spec, made)


def seconds(driver: Driver, kernel: GemmKernel, spec: GemmSpec, made: Assembly | None = None) -> float:
    """The median of some launches on a device, after some that are not counted."""
    function = driver.load(kernel.ptx.encode() if made is None else made.cubin).function(kernel.name)
    operands = [max(nbytes, 16) for nbytes in sizes(spec)]
    shared = [kernel.workspace_bytes, 4 * max(kernel.flags, 1)] if kernel.workspace_bytes else []
    fills: list[Fill] = []
    try:
        for nbytes in (operands[0], *shared, *operands[1:]):
            fills.append(Fill(driver.alloc(nbytes), 0, nbytes))
            driver.submit(fills[-1])
        args = arguments(driver, kernel, spec, [fill.target for fill in fills])
        launch = Launch(function, kernel.grid_for(spec.m), (kernel.threads, 1, 1), args, kernel.dynamic_smem,
                        (*kernel.cluster, 1, 1)[:3])
        return _median(driver, launch, fills[2:3] if shared else [])
    finally:
        driver.synchronize()
        for fill in fills: driver.free(fill.target)


def arguments(driver: Driver, kernel: GemmKernel, spec: GemmSpec, addresses: list[int]) -> tuple[bytes, ...]:
    """A launch's, of buffers in the order of the pointers."""
    made = [pointer(address) for address in addresses]
    if spec.symbolic: made.append(integer(spec.m))
    made += [driver.tensor_map(map_spec(one, addresses[one.pointer], spec.m)) for one in kernel.maps]
    return tuple(made)


def _median(driver: Driver, launch: Launch, zeroed: list[Fill]) -> float:
    """Of the launches, with the flags set to zero before each outside the time."""
    times = []
    for number in range(WARM + TIMED):
        for fill in zeroed: driver.submit(fill)
        start, end = driver.event(), driver.event()
        driver.record(start)
        driver.submit(launch)
        driver.record(end)
        driver.wait_for(end)
        if number >= WARM: times.append(driver.elapsed_ms(start, end) / 1e3)
    return sorted(times)[TIMED // 2]
