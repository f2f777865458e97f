"""What the kernels of a device are made for: a GPU behind a driver of ours, or the CPU.

Protocol: `target_of(device)` is a `GPU`, a `CPU`, or None where kernels are tinygrad's business;
`machine_of` knows GPUs alone. Shards of one kind of device have one target. `configuration` is what kernels
for the CPU depend on besides the graph, for the keys of schedules.
"""
from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from tinygrad.device import Device
from tinygrad.helpers import DEV, to_tuple
from tinygrad.renderer.cstyle import ClangRenderer

from tinygrad_nv import config
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.runtime.clock import DriverClock
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.runtime.renderers import renderer_of
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

GPUS = ("EMU", "CUDA")
Target = GPU | CPU


@functools.lru_cache(4096)
def cpu_kernel(spec: Any, schedule: Any, target: CPU, integers: tuple[Integer, ...] = ()) -> Any:
    """The kernel of a spec on a CPU, or kernels; they compute their integers themselves."""
    return TABLE.build(spec, schedule, target, integers)


def target_of(device: str | tuple[str, ...] | None) -> Target | None:
    """What runs a device's kernels; None if they are not ours."""
    return machine_of(device) or cpu_of(device)


def machine_of(device: str | tuple[str, ...] | None) -> GPU | None:
    """The GPU that runs a device's kernels, None if its driver is not ours."""
    names = to_tuple(device) if device is not None else ()
    if any(kind_of(name) not in GPUS for name in names): return None
    found = {_machine(name) for name in names}
    return found.pop() if len(found) == 1 else None


def cpu_of(device: str | tuple[str, ...] | None) -> CPU | None:
    """The CPU, where a device is that and its renderer compiles C."""
    names = to_tuple(device) if device is not None else ()
    if not names or any(kind_of(name) != "CPU" for name in names) or not config.get("NV_CPU"): return None
    # DEV=CPU:LLVM and the like take no C
    return host() if all(isinstance(renderer_of(name), ClangRenderer) for name in names) else None


def why_no_cpu(device: str | tuple[str, ...] | None) -> str:
    """Why a CPU's kernels are tinygrad's alone; "" where they are not, and of other devices."""
    names = to_tuple(device) if device is not None else ()
    if not names or any(kind_of(name) != "CPU" for name in names) or cpu_of(device) is not None: return ""
    if not config.get("NV_CPU"): return "NV_CPU=0 leaves the CPU to tinygrad"
    return f"{type(Device[names[0]].renderer).__name__} takes no C"


def takes(device: str | tuple[str, ...] | None) -> bool:
    """Whether kernels of ours run on a device; opens no GPU."""
    names = to_tuple(device) if device is not None else ()
    return bool(names) and (all(kind_of(name) in GPUS for name in names) or cpu_of(device) is not None)


def kind_of(name: str) -> str:
    """EMU of EMU:1."""
    return name.split(":")[0]


def configuration() -> Hashable:
    """What kernels are made for now: the CPU, GPUs that are open, and DEV, which chooses their renderers."""
    gpus = sorted(name for name in Device._opened_devices if kind_of(name) in GPUS)
    machine = host() if config.get("NV_CPU") else None
    return machine, config.get("EMU_ARCH"), tuple(DEV.value), *map(_arch, gpus)


def _arch(name: str) -> tuple[str, str]:
    driver: Driver | None = getattr(Device[name], "driver", None)
    return name, "" if driver is None else driver.properties.arch


def _machine(name: str) -> GPU | None:
    driver: Driver | None = getattr(Device[name], "driver", None)
    if driver is None: return None
    emulated = kind_of(name) == "EMU"
    return GPU(driver.properties.arch, driver.properties.sm_count, driver.clusters,
                   None if emulated else DriverClock(driver))
