"""How long a kernel takes: what tells it, and for which GPU.

Protocol: a `Clock` times the kernels of a spec: on a device ("measured": runtime/clock.py), or by the timing
model ("modelled": emulated.py). Without either, a matmul is "counted": the cost model's seconds by counters
of the emulator. `HOWS` has them in the order of what they are worth. `figures_of` finds the GPU of
ptx/timing/gpus that the timing model takes for a target, by its name there: "h100".
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from tinygrad_nv import config
from tinygrad_nv.ptx.gpcs import Clusters

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly

How = Literal["counted", "modelled", "measured"]
HOWS: tuple[How, ...] = ("counted", "modelled", "measured")


class Conditions(TypedDict, total=False):
    """Conditions of a measurement: the driver's version, and whether power or heat kept the clock down."""
    driver: str
    throttled: bool


class Clock(Protocol):
    """A GPU that launches kernels. `clusters` are those that it has room for at once."""
    @property
    def how(self) -> How: ...

    @property
    def clusters(self) -> Clusters: ...

    def conditions(self) -> Conditions:
        """Returns under which conditions it measured since this was asked last."""

    def seconds(self, made: Any, spec: Any, assembled: Sequence[Assembly] = ()) -> float:
        """Returns the seconds of a call of what a template built. `assembled`: its kernels, in the order of
        launches, where that was done."""


def figures_of(arch: str, sm_count: int = 0, device: str = "") -> str:
    """The name of a GPU's figures: NV_TIMING_GPU, or the first of the architecture with as many SMs (0: with
    any); of a `device` with a name, those that it names, but for the emulated one. "" where there are none.
    Raises `ConfigError` for a setting that names no GPU."""
    named = "" if device.startswith("emulated ") else device
    return _figures_of(arch, sm_count, named, str(config.get("NV_TIMING_GPU")))


@functools.cache
def _figures_of(arch: str, sm_count: int, device: str, named: str) -> str:
    from tinygrad_nv.ptx.timing import gpu  # for GPUs alone
    if named: return named if gpu.figures(named).arch == arch else ""
    fits = [name for name in gpu.list_gpus() if gpu.figures(name).arch == arch
            and sm_count in (0, gpu.figures(name).sms) and (not device or name in device.lower().split())]
    return fits[0] if fits else ""
