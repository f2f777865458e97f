"""A kernel on the emulator or on a device, to see what it costs.

Protocol: `counters(spec, schedule, arch)` runs a small product twice, which differ in K alone, and gives the
two runs' counters; `seconds(driver, kernel, spec)` times a kernel on a device. What is small: as many tiles
as a cluster has, two for each CTA in ping-pong, and sums of `few_steps` and of a few steps more. Splits and
stream-K change which CTA does a step, not the step, and are left out. Operands are zeros; checks are off.
"""
from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tinygrad_nv.errors import KernelError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.runtime.driver import Driver, Fill, Launch, integer, map_spec, pointer
from tinygrad_nv.tile.expression import loads
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.gemm.templates import build
from tinygrad_nv.tile.gemm.work import columns
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.schedule import Schedule

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly

STEPS_MORE = 4
WARM, TIMED = 3, 11                 # launches


@dataclass(frozen=True)
class Trial:
    """Two runs of `tiles` tiles each, with sums of so many steps."""
    short: Stats
    long: Stats
    steps: tuple[int, int]
    tiles: int


def counters(spec: GemmSpec, schedule: Schedule, arch: str) -> Trial:
    """What the emulator counts of a schedule's kernel."""
    s = replace(schedule, splits=1, stream=False)
    steps = s.depth + 2, s.depth + 2 + STEPS_MORE
    cluster = s.cluster_m * s.cluster_n
    rounds = 2 if s.mode == "pingpong" else 1
    runs = []
    for count in steps:
        small = shrunk(spec, s, count * s.block_k, rounds)
        kernel = build(small, s, arch, cluster)
        runs.append(emulated(kernel, small, arch))
    return Trial(runs[0], runs[1], steps, rounds * cluster)


def shrunk(spec: GemmSpec, s: Schedule, k: int, rounds: int) -> GemmSpec:
    """The same kind of product: one matrix of so much K, and as many rows and columns as a cluster's tiles
    have (`rounds` times), at most those it has. Strides are the same where sums fit between them."""
    m, n = (s.block_n, s.block_m) if s.swap else (s.block_m, columns(spec, s))
    clusters = (s.cluster_n, s.cluster_m) if s.swap else (s.cluster_m, s.cluster_n)
    m, n = min(spec.m, m * clusters[0]), min(spec.n, n * clusters[1])
    if m < spec.m: m = min(spec.m, m * rounds)
    else: n = min(spec.n, n * rounds)
    batch = (1,) * len(spec.batch)
    return replace(spec, m=m, n=n, k=k, batch=batch, a=_longer(spec.a, k), b=_longer(spec.b, k))


def _longer(operand: Operand, k: int) -> Operand:
    """An operand whose rows have room for so much K, with the alignment it had."""
    if operand.k != 1 or operand.mn >= k: return operand
    return replace(operand, mn=operand.mn + -(-(k - operand.mn) // 64) * 64)


def sizes(spec: GemmSpec) -> list[int]:
    """Bytes of the buffers that a kernel's pointers mean: out, a, b, x0, x1, …"""
    def reach(offset: int, *axes: tuple[int, int]) -> int:
        return offset + sum((extent - 1) * stride for extent, stride in axes) + 1
    def batch(strides: tuple[int, ...]) -> list[tuple[int, int]]:
        return [*zip(spec.batch, strides, strict=False)]
    out, a, b = spec.out, spec.a, spec.b
    made = [reach(out.offset, (spec.m, out.m), (spec.n, out.n), *batch(out.batch)) * out.dtype.itemsize,
            reach(a.offset, (spec.m, a.mn), (spec.k, a.k), *batch(a.batch)) * a.dtype.itemsize,
            reach(b.offset, (spec.n, b.mn), (spec.k, b.k), (spec.parts, spec.part), *batch(b.batch))
            * b.dtype.itemsize]
    extras = [0] * len(spec.parameters)
    for load in loads(spec.epilogue):
        nbytes = reach(load.offset, (spec.m, load.m), (spec.n, load.n), *batch(load.batch)) \
            * load.dtype.itemsize
        extras[load.parameter] = max(extras[load.parameter], nbytes)
    return made + extras


# **** the emulator ****

def emulated(kernel: GemmKernel, spec: GemmSpec, arch: str) -> Stats:
    """Counters of one launch with operands of zeros."""
    emu = Emulator(arch, check=False)
    out, *operands = [emu.alloc(np.zeros(-(-nbytes // 16) * 16, np.uint8)) for nbytes in sizes(spec)]
    shared = (kernel.workspace_bytes, 4 * max(kernel.flags, 1)) if kernel.workspace_bytes else ()
    order = [out, *(emu.alloc(np.zeros(size, np.uint8)) for size in shared), *operands]
    maps = []
    for one in kernel.maps:
        dims = tuple(spec.m if i == one.dynamic else extent for i, extent in enumerate(one.dims))
        maps.append(TensorMap.tiled(order[one.pointer].ptr + one.offset_bytes, one.box[::-1], one.swizzle,
                                    dims[::-1], one.strides[::-1], one.dtype))
    rows = [np.uint32(spec.m)] if spec.symbolic else []
    report = emu.launch(kernel.ptx, kernel.grid_for(spec.m), kernel.threads, [*order, *rows, *maps],
                        cluster=kernel.cluster, dynamic_smem=kernel.dynamic_smem)
    if report.findings: raise KernelError(str(report.findings[0]), "a kernel that comes to its end")
    return report.stats


# **** a device ****

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
    return statistics.median(times)
