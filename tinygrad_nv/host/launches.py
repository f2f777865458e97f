"""A launch on the emulated GPU: checked as CUDA checks it, run, and what came of it.

Protocol: `launched(...)` runs a kernel with the emulator's checks (`Options.check`), or without, or, with
`Options.time` alone, predicts its time and leaves memory as it is. A `LaunchReport` has findings, counters
and the prediction. A launch that was predicted before, with the same kernel, shape and parameters, has the
same prediction.
"""
from __future__ import annotations

import ctypes
import ctypes.util
import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.modules import STATIC_LIMIT, Kernel
from tinygrad_nv.ptx.emulator import Emulator, Finding, Report, Stats
from tinygrad_nv.ptx.emulator.arguments import BLOCK_LIMIT, GRID_LIMIT, Triple
from tinygrad_nv.ptx.emulator.footprint import Footprint
from tinygrad_nv.ptx.timing.model import Timing

PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
DYNAMIC_SHARED, NON_PORTABLE = 8, 14        # cudaFuncAttribute
STATUS = {"out-of-bounds": Status.ILLEGAL_ADDRESS, "misaligned": Status.MISALIGNED_ADDRESS,
          "deadlock": Status.LAUNCH_TIMEOUT, "instruction-limit": Status.LAUNCH_TIMEOUT}


@dataclass(frozen=True)
class Options:
    """Options that are asked for: findings of all checks, predicted times."""
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
    """Report of a launch. `kernel` is its name in the PTX, `name` that in C++; `status` what CUDA says of it;
    `seconds`: of the emulation. `timing` is a prediction, None where it was not asked for."""
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
    printed: str = ""
    ptx: str = field(default="", repr=False)

    @property
    def name(self) -> str: return demangle(self.kernel)


def check(launch: Launch, arch: str) -> None:
    """Raises `CudaError` for what CUDA refuses, with what is allowed."""
    number, kernel, block = int(arch[3:5]), launch.kernel, prod(launch.block)

    def refuse(status: Status, found: str, allowed: str) -> None:
        raise CudaError(status, f"{found} of {kernel.name}; allowed: {allowed}")

    for name, extents, limits in (("grid", launch.grid, GRID_LIMIT), ("block", launch.block, BLOCK_LIMIT)):
        if any(not 0 < x <= most for x, most in zip(extents, limits, strict=True)):
            refuse(Status.INVALID_CONFIGURATION, f"a {name} of {extents}", f"1 to {limits}")
    if block > (most := most_threads(kernel)):
        refuse(Status.INVALID_CONFIGURATION, f"a block of {block} threads", f"{most}")
    allowed = kernel.attributes.get(DYNAMIC_SHARED, max(0, STATIC_LIMIT - kernel.static_bytes))
    if launch.dynamic_smem > allowed:
        refuse(Status.INVALID_VALUE, f"{launch.dynamic_smem} bytes of dynamic shared memory",
               f"{allowed}, or what cudaFuncAttributeMaxDynamicSharedMemorySize is set to")
    size, largest = prod(launch.cluster), largest_cluster(kernel)
    if size > 1 and number < 90: refuse(Status.NOT_SUPPORTED, f"a cluster of {size} CTAs", f"none on {arch}")
    if size > largest:
        refuse(Status.INVALID_CLUSTER_SIZE, f"a cluster of {size} CTAs",
               f"{largest}; 16 with cudaFuncAttributeNonPortableClusterSizeAllowed")
    if any(x % y for x, y in zip(launch.grid, launch.cluster, strict=True)):
        refuse(Status.INVALID_VALUE, f"a grid of {launch.grid}", f"whole clusters of {launch.cluster}")


def largest_cluster(kernel: Kernel) -> int:
    """CTAs that a cluster of a kernel may have."""
    return MOST_CLUSTER if kernel.attributes.get(NON_PORTABLE) else PORTABLE_CLUSTER


def most_threads(kernel: Kernel) -> int:
    """Threads that a block of a kernel may have."""
    directives = kernel.function.directives
    return min(1024, prod(directives.get("reqntid") or directives.get("maxntid") or (1024,)))


def run_launch(emulator: Emulator, launch: Launch, options: Options, gpu: str, known: dict[object, Timing],
             ahead: Sequence[Footprint] = ()) -> tuple[LaunchReport, Report]:
    """Runs it, or predicts its time, or both; a programmatic launch beside the kernels `ahead`."""
    shape = launch.kernel.name, launch.grid, launch.block, launch.cluster, launch.dynamic_smem
    text, began = launch.kernel.module.text, time.perf_counter()

    def run(timing: str | None) -> Report:
        return emulator.launch(text, launch.grid, launch.block, launch.parameters, launch.kernel.name,
                               launch.cluster, launch.dynamic_smem, timing=timing, strict=False,
                               footprint=options.check,
                               ahead=ahead if launch.pdl and options.check else None)

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
                        report.stats, timing, time.perf_counter() - began, report.printed, text), report


def status_of(findings: list[Finding]) -> Status:
    """Returns what CUDA says after a launch with these findings; of a race it says nothing."""
    for finding in findings:
        if finding.kind in STATUS: return STATUS[finding.kind]
        if finding.message.startswith("trap"): return Status.LAUNCH_FAILURE
        if finding.message.startswith("assert"): return Status.ASSERT
    return Status.SUCCESS


@functools.cache
def _library() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("stdc++")
    if name is None: return None
    made = ctypes.CDLL(name)
    made.__cxa_demangle.restype = ctypes.c_void_p
    return made


@functools.lru_cache(1024)
def demangle(name: str) -> str:
    """Returns the name without mangling; itself where it is no C++ name. Where the system's C++ library is
    not there, or does not know it, only its beginning is told."""
    if not name.startswith("_Z"): return name
    library, status = _library(), ctypes.c_int()
    found = library and getattr(library, "__cxa_demangle")(name.encode(), None, None, ctypes.byref(status))
    if not found: return _beginning(name)
    text = ctypes.string_at(found).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text


def _beginning(name: str) -> str:
    """The parts of a nested name up to the first template argument."""
    parts, at = [], 3 if name.startswith("_ZN") else 2
    while (length := re.match(r"\d+", name[at:])) is not None:
        at += len(length[0])
        parts.append(name[at:at + int(length[0])])
        at += int(length[0])
    return "::".join(parts) + ("<…>" if name[at:at + 1] == "I" else "") if parts else name
