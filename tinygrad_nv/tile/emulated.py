"""A spec's kernels on the emulator, with operands of zeros: what they count, or how long they take on a GPU.

Protocol: `launch_all(made, spec, arch)` runs what a template built, without checks, and gives a report for
each launch; `timings(made, spec, gpu)` predicts the launches on a GPU of ptx/timing/gpus instead. An operand
whose name is among `given` holds that.

`ModelledClock("h100")` is the clock without a GPU (tile/clock.py): the timing model predicts the launches,
nothing is measured. A candidate of a large problem takes a few seconds: a few CTAs are recorded, without
tensor arithmetic, and operands take no memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tinygrad_nv.errors import KernelError
from tinygrad_nv.ptx.assemble import find_program
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.ptx.sass import disassembler
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.sequence import in_row, seconds
from tinygrad_nv.tile.arguments import NOTHING, Contents, integers, launches
from tinygrad_nv.tile.clock import Conditions, How
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.template import GPU

if TYPE_CHECKING:
    from tinygrad_nv.ptx.assemble import Assembly


def launch_all(made: Any, spec: Any, arch: str, given: Contents = NOTHING, **options: Any) -> list[Report]:
    """A report for each launch; `options` are those of `Emulator.launch`. Raises `KernelError` where a kernel
    does not come to its end."""
    emu, values, reports = Emulator(arch, check=False), integers(spec), []

    def alloc(nbytes: int, contents: np.ndarray | None) -> Buffer:
        buffer = emu.zeros(nbytes)
        if contents is not None: buffer.data[:contents.nbytes] = contents.reshape(-1).view(np.uint8)
        return buffer
    for each, order in launches(made, spec, alloc, given):
        maps = [tensor_map(order, one, values) for one in each.maps]
        reports.append(emu.launch(each.ptx, each.grid, each.threads, [*order, *map(np.uint32, values), *maps],
                                  each.name, each.cluster, each.dynamic_smem, **options))
        if reports[-1].findings:
            raise KernelError(str(reports[-1].findings[0]), "a kernel that comes to its end")
    return reports


def timings(made: Any, spec: Any, gpu: str | GPUFigures, log: int = 0,
            given: Contents = NOTHING) -> list[Timing]:
    """A prediction for each launch, with `log` issues. Raises `ConfigError` for a GPU without figures."""
    arch = (figures(gpu) if isinstance(gpu, str) else gpu).arch
    found = launch_all(made, spec, arch, given, timing=gpu, log=log, keep=False)
    return [each.timing for each in found if each.timing is not None]


def tensor_map(order: Sequence[Buffer], argument: MapArgument, values: Sequence[int]) -> TensorMap:
    """A kernel's tensor map over its pointers, with the integers of its launch."""
    rows = values[argument.integer] if argument.dynamic >= 0 else 0
    dims = tuple(rows if i == argument.dynamic else extent for i, extent in enumerate(argument.dims))
    at, rest = order[argument.pointer].ptr + argument.offset_bytes, (dims[::-1], argument.strides[::-1])
    if argument.lower:
        channels, pixels = argument.box
        return TensorMap.im2col(at, argument.lower[::-1], argument.upper[::-1], channels, pixels,
                                argument.swizzle, *rest, argument.dtype, argument.steps[::-1])
    return TensorMap.of_tiles(at, argument.box[::-1], argument.swizzle, *rest, argument.dtype)


@dataclass(frozen=True)
class ModelledClock:
    """The GPU with figures of that name."""
    gpu: str
    clusters: Clusters = ()
    how: ClassVar[How] = "modelled"

    def conditions(self) -> Conditions:
        """None: nothing is measured."""
        return {}

    def seconds(self, made: Any, spec: Any, assembled: Sequence[Assembly] = ()) -> float:
        """Returns the seconds of a call's launches in a row. Raises `PTXError` where ptxas or the model
        refuses a kernel."""
        gpu = figures(self.gpu)
        return seconds(in_row(timings(made, spec, self.gpu), gpu), gpu)


def clock_of(gpu: GPU) -> ModelledClock | None:
    """The clock of a target, None where the model has no figures for it, or lacks a program. Raises
    `ConfigError` where NV_TIMING_GPU names no GPU."""
    program = disassembler()
    if not gpu.figures or find_program("ptxas") is None or program is None or program.name != "nvdisasm":
        return None
    return ModelledClock(gpu.figures, gpu.clusters)
