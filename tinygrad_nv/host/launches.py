"""A launch on the emulated GPU: checked as CUDA checks it, run, and what came of it.

Protocol: `launched(...)` runs a kernel with the emulator's checks (`Options.check`), or without, or, with
`Options.time` alone, predicts its time and leaves memory as it is. A `LaunchReport` has findings, counters
and the prediction. A launch that was predicted before, with the same kernel, shape and parameters, has the
same prediction.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import prod

from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.modules import STATIC_LIMIT, Kernel
from tinygrad_nv.ptx.emulator import Emulator, Finding, Report, Stats
from tinygrad_nv.ptx.emulator.arguments import BLOCK_LIMIT, GRID_LIMIT, SHARED_LIMIT, Triple
from tinygrad_nv.ptx.timing.model import Timing

PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
DYNAMIC_SHARED, NON_PORTABLE = 8, 14        # cudaFuncAttribute
STATUS = {"out-of-bounds": Status.ILLEGAL_ADDRESS, "misaligned": Status.MISALIGNED_ADDRESS,
          "deadlock": Status.LAUNCH_TIMEOUT, "instruction-limit": Status.LAUNCH_TIMEOUT}


@dataclass(frozen=True)
class Options:
    """What is asked for: findings of all checks, predicted times."""
    check: bool = False
    time: bool = False

    @property
    def run(self) -> bool:
        """Whether kernels run: what only predicts runs no more than chosen CTAs."""
        return self.check or not self.time


@dataclass(frozen=True)
class Launch:
    """A launch as the program asks for it; `parameters` are the bytes of each."""
    kernel: Kernel
    grid: Triple
    block: Triple
    cluster: Triple
    dynamic_smem: int
    parameters: tuple[bytes, ...]
    pdl: bool = False


@dataclass(frozen=True)
class LaunchReport:
    """What came of a launch. `status` is what CUDA says of it; `seconds`: of the emulation. `timing` is a
    prediction, None where it was not asked for."""
    kernel: str
    grid: Triple
    block: Triple
    cluster: Triple
    dynamic_smem: int
    status: Status
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    stats: Stats = field(default_factory=Stats)
    timing: Timing | None = None
    seconds: float = 0.0
    ptx: str = field(default="", repr=False)


def check(launch: Launch, arch: str) -> None:
    """Raises `CudaError` for what CUDA refuses."""
    number, kernel = int(arch[3:5]), launch.kernel
    if any(not 0 < x <= most for x, most in zip(launch.grid, GRID_LIMIT, strict=True)):
        raise CudaError(Status.INVALID_CONFIGURATION)
    if any(not 0 < x <= most for x, most in zip(launch.block, BLOCK_LIMIT, strict=True)):
        raise CudaError(Status.INVALID_CONFIGURATION)
    directives = kernel.function.directives
    threads = prod(directives.get("reqntid") or directives.get("maxntid") or (1024,))
    if prod(launch.block) > min(1024, threads): raise CudaError(Status.INVALID_CONFIGURATION)
    allowed = kernel.attributes.get(DYNAMIC_SHARED, max(0, STATIC_LIMIT - kernel.static_bytes))
    if launch.dynamic_smem > allowed or kernel.static_bytes + launch.dynamic_smem > SHARED_LIMIT[number]:
        raise CudaError(Status.INVALID_VALUE)
    size = prod(launch.cluster)
    most = MOST_CLUSTER if kernel.attributes.get(NON_PORTABLE) else PORTABLE_CLUSTER
    if size > 1 and (number < 90 or size > most): raise CudaError(Status.INVALID_CLUSTER_SIZE)
    if any(x % y for x, y in zip(launch.grid, launch.cluster, strict=True)):
        raise CudaError(Status.INVALID_CONFIGURATION)


def launched(emulator: Emulator, launch: Launch, options: Options, gpu: str,
             known: dict[object, Timing]) -> LaunchReport:
    """Runs it, or predicts its time, or both. Raises `CudaError` where CUDA refuses it."""
    check(launch, emulator.arch)
    shape = launch.kernel.name, launch.grid, launch.block, launch.cluster, launch.dynamic_smem
    text, began = launch.kernel.module.text, time.perf_counter()

    def run(timing: str | None) -> Report:
        return emulator.launch(text, launch.grid, launch.block, launch.parameters, launch.kernel.name,
                               launch.cluster, launch.dynamic_smem, timing=timing)

    report, timing = Report(), None
    if options.time:
        key = (launch.kernel, *shape, launch.parameters)
        if key not in known:
            found = run(gpu).timing
            assert found is not None
            known[key] = found
        timing = known[key]
    if options.run: report = run(None)
    return LaunchReport(*shape, status_of(report.findings), tuple(report.findings), tuple(report.notes),
                        report.stats, timing, time.perf_counter() - began, text)


def status_of(findings: list[Finding]) -> Status:
    """What CUDA says after a launch with these findings; of a race it says nothing."""
    for finding in findings:
        if finding.kind in STATUS: return STATUS[finding.kind]
        if finding.message.startswith("trap"): return Status.LAUNCH_FAILURE
        if finding.message.startswith("assert"): return Status.ASSERT
    return Status.SUCCESS
