"""Inspection of a kernel for a reader: `kernel.explain(…)`, `kernel.check(…)`, `kernel.time(…)`.

Protocol: each takes the arguments of a call and runs nothing on the device. `explain` prints every level:
arguments, schedule, Tile IR, text. `check` runs the PTX on the emulator and gives its findings and counters
(races, bank conflicts, out-of-bounds accesses). `time` is what the timing model predicts.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import ConfigError, KernelError, ScheduleError
from tinygrad_nv.language.building import build
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.ptx.timing import gpu as figures
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

WORDS = {1: dtypes.uint8, 2: dtypes.uint16, 4: dtypes.uint32}
ARCHS = ("sm_80", "sm_89", "sm_90a")


@dataclass(frozen=True)
class Checked:
    """The reports of a kernel's launches on the emulator, and the outputs that it wrote."""
    arch: str
    reports: tuple[Report, ...]
    outputs: Mapping[str, np.ndarray[Any, Any]]

    @property
    def findings(self) -> list[Any]:
        """Findings; empty when nothing is wrong."""
        return [finding for report in self.reports for finding in report.findings]

    def __str__(self) -> str:
        if not self.findings: return f"{self.arch}: no finding"
        return "\n".join(f"{self.arch}: {finding}" for finding in self.findings)


def check(program: Program, schedule: TileSchedule, tensors: Mapping[str, Tensor], arch: str,
          seed: int) -> Checked:
    """Runs a program's PTX on the emulator with a call's tensors."""
    from tinygrad_nv.ptx.emulator import Emulator
    from tinygrad_nv.tile.emulated import tensor_map
    if arch not in ARCHS: raise ConfigError(f"arch={arch!r}", f"one of {', '.join(ARCHS)}")
    made, emu = build(program, schedule, GPU(arch)), Emulator(arch, seed=seed)
    buffers = {}
    for each in program.tensors:
        buffers[each.name] = buffer = emu.zeros(max(16, each.numel * each.dtype.itemsize))
        if each.name in tensors:
            words = WORDS[each.dtype.itemsize]
            data = tensors[each.name].clone().realize().bitcast(words).numpy().reshape(-1).view(np.uint8)
            buffer.data[:data.nbytes] = data
    reports = []
    for one in made.kernels:
        order = [buffers[each.name] for each in program.tensors]
        maps = [tensor_map(order, each, ()) for each in one.maps]
        reports.append(emu.launch(one.ptx, one.grid, one.threads, [*order, *maps], one.name, one.cluster,
                                  one.dynamic_smem))
    outputs = {each.name: _array(buffers[each.name].data, each.dtype, each.shape)
               for each in program.tensors if each.output}
    return Checked(arch, tuple(reports), outputs)


def _array(data: np.ndarray[Any, Any], dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Elements of memory, floats as float32."""
    count = int(np.prod(shape)) if shape else 1
    raw = bytes(data[:count * dtype.itemsize])
    made = Tensor(raw, dtype=dtype, device="CPU")
    return (made.cast(dtypes.float32) if dtypes.is_float(dtype) else made).numpy().reshape(shape)


def predict_us(program: Program, schedule: TileSchedule, name: str) -> float:
    """Microseconds of a program on a GPU of the timing model."""
    from tinygrad_nv.tile.emulated import ModelledClock, clock_of
    if name not in figures.list_gpus():
        raise ConfigError(f"gpu={name!r}", f"one of {', '.join(figures.list_gpus())}")
    found = figures.figures(name)
    target = GPU(found.arch, found.sms)
    if clock_of(target) is None:
        raise ScheduleError(f"no time of {program.name}: the timing model needs ptxas and nvdisasm",
                            "these programs", "pip install 'tinygrad-nv[emulator]'")
    try: return ModelledClock(name).seconds(build(program, schedule, target), program) * 1e6
    except KernelError as error: raise ScheduleError(f"no time of {program.name}: {error}") from error


def find_target(arch: str, sm_count: int = 0) -> Target:
    """A GPU of an architecture, or this CPU. Raises `ConfigError` for another."""
    if arch == "cpu": return host()
    if arch not in ARCHS: raise ConfigError(f"arch={arch!r}", f"cpu, or one of {', '.join(ARCHS)}")
    found = gpu_model_for(arch, sm_count)
    return GPU(arch, found.sm_count)


def explain_levels(program: Program, schedule: TileSchedule, text: str, device: str, full: bool) -> str:
    """Returns all levels as text: the Tile IR, and with `full` what is compiled."""
    head = [f"kernel {program.name} on {device}", f"schedule   {schedule}",
            f"programs   {' x '.join(map(str, program.grid))}"]
    parts = ["\n".join(head), str(program)]
    if full: parts.append(text)
    else: parts.append(f"text       {len(text.splitlines())} lines; full=True prints them")
    return "\n\n".join(parts)
