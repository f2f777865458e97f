"""The clock without a GPU: the timing model (ptx/timing/) predicts the launches. Nothing is measured.

Protocol: `ModelledClock("h100")` is a `tile.clock.Clock`; `clock_of(gpu)` is that of a target, None where the
model has no figures for it, or lacks a program. A candidate of a large problem takes a few seconds: a few
CTAs are recorded, without tensor arithmetic, and operands take no memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tinygrad_nv.ptx.assemble import find_program
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.ptx.sass import disassembler
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.sequence import in_row, seconds
from tinygrad_nv.tile.clock import How
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.template import GPU

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly


@dataclass(frozen=True)
class ModelledClock:
    """The GPU with figures of that name."""
    gpu: str
    clusters: Clusters = ()
    how: ClassVar[How] = "modelled"

    def seconds(self, made: Any, spec: Any, assembled: Sequence[Assembly] = ()) -> float:
        """Returns the seconds of a call's launches in a row. Raises `PTXError` where ptxas or the model
        refuses a kernel."""
        gpu = figures(self.gpu)
        return seconds(in_row(timings(made, spec, self.gpu), gpu), gpu)


def clock_of(gpu: GPU) -> ModelledClock | None:
    """The clock of a target. Raises `ConfigError` where NV_TIMING_GPU names no GPU."""
    program = disassembler()
    if not gpu.figures or find_program("ptxas") is None or program is None or program.name != "nvdisasm":
        return None
    return ModelledClock(gpu.figures, gpu.clusters)
