"""Targets that the kernels of a device are made for: a GPU behind a driver of ours, or the CPU.

Protocol: `target_of(device)` is a `GPU`, a `CPU`, or None where kernels are tinygrad's business. Shards of
one kind of device have one target. What a pattern has found becomes kernels in the same steps whatever the
target is: `choose(spec, target)` finds a schedule, `Chosen.build` makes the kernels, once for all graphs, and
`Chosen.call` calls them. `configuration` is what kernels depend on besides the graph, for the keys of
schedules.
"""
from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad.device import Device
from tinygrad.helpers import BEAM, DEV, to_tuple
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.runtime.renderers import renderer_of
from tinygrad_nv.tile import database, order
from tinygrad_nv.tile.clock import Clock, figures_of
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

GPUS = ("EMU", "CUDA")
OTHERS = 6      # arguments besides output and inputs that kernels of a match have at most: scratch, integers
Target = GPU | CPU


def target_of(device: str | tuple[str, ...] | None) -> Target | None:
    """Returns the target that runs a device's kernels; None if they are not ours."""
    return _gpu_of(device) or cpu_of(device)


def _gpu_of(device: str | tuple[str, ...] | None) -> GPU | None:
    """The GPU that runs a device's kernels, None if its driver is not ours."""
    names = to_tuple(device) if device is not None else ()
    if any(kind_of(name) not in GPUS for name in names): return None
    found = {_gpu(name) for name in names}
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
    """Returns the targets of now: the CPU, GPUs that are open, and DEV, which chooses their renderers; and
    the settings that choose their schedules."""
    gpus = sorted(name for name in Device._opened_devices if kind_of(name) in GPUS)
    cpu = host() if config.get("NV_CPU") else None
    tuned = BEAM.value, database.state(), config.get("NV_TIMING_GPU"), config.get("NV_QUANT_ACTIVATIONS")
    return (cpu, config.get("EMU_ARCH"), tuple(DEV.value), tuned, config.get("NV_ALL_REDUCE"),
            *map(_arch, gpus))


def _arch(name: str) -> tuple[str, str]:
    driver: Driver | None = getattr(Device[name], "driver", None)
    return name, "" if driver is None else driver.properties.arch


def _gpu(name: str) -> GPU | None:
    driver: Driver | None = getattr(Device[name], "driver", None)
    if driver is None: return None
    there, clock = driver.properties, None if kind_of(name) == "EMU" else _clock(driver)
    return GPU(there.arch, there.sm_count, driver.clusters, clock,
               figures_of(there.arch, there.sm_count, there.name))


def _clock(driver: Driver) -> Clock:
    from tinygrad_nv.runtime.clock import DriverClock  # numpy
    from tinygrad_nv.runtime.observe.telemetry import Telemetry
    ordinal = getattr(driver, "ordinal", None)
    return DriverClock(driver, None if ordinal is None else lambda: Telemetry(int(ordinal)))


# **** kernels ****

@dataclass(frozen=True)
class Chosen:
    """Spec and schedule that make kernels. `integers` are those of their launch, where it has other variables
    than they do."""
    spec: Any
    schedule: Schedule
    target: Target
    integers: tuple[Integer, ...] = ()

    @functools.lru_cache(4096)  # noqa: B019  equal ones are the same kernels, which all graphs share
    def build(self) -> program.Built:
        """The kernels."""
        made: program.Built = TABLE.build(self.spec, self.schedule, self.target, self.integers)
        return made

    @property
    def tuning_note(self) -> str:
        """Note on how the time is known of a schedule that was found by trying, and the time; \"\" of
        others."""
        entry = database.find_winner(self.spec, self.target.arch, self.target)
        return "" if entry is None or entry.schedule != self.schedule else \
            f"{entry.provenance}: {entry.seconds * 1e6:.1f} µs"

    def call(self, device: str | tuple[str, ...] | None, outputs: Sequence[program.Output | UOp],
               inputs: Sequence[UOp], name: str = "", words: str = "", **counted: Any) -> tuple[UOp, ...]:
        """The outputs of the kernels, called as `program.call` does. `name` is the template that explain()
        shows, `words` are for its reader."""
        assert device is not None
        text = f"{self.spec}: {self.schedule}" if self.schedule.words() else str(self.spec)
        if order.is_wanted() and (made := TABLE.choose_ordered(self.spec, self.target)):
            text += f"; {order.CLASS}{made.words}"
        elif tuned := self.tuning_note: text += f", {tuned}"
        note = Note(name or self.schedule.template, text + words, self.spec, self.schedule)
        return program.call(self.build(), device, outputs, inputs, note=note, **counted)


def choose(spec: Any, target: Target, integers: tuple[Integer, ...] = (), inputs: int = 0) -> Chosen:
    """A spec with the schedule that its family has for it. Raises `Unsupported` where no template takes it,
    and for more `inputs` than a kernel with one output can have: a pattern may try a smaller region then."""
    if words := target.overfull(1 + inputs, OTHERS): raise Unsupported(f"{inputs} inputs: {words}")
    if (schedule := TABLE.choose(spec, target)) is None: raise Unsupported(TABLE.why_not(spec, target))
    return Chosen(spec, schedule, target, integers)
