"""Kernels of programs, built once for each target."""
from __future__ import annotations

from typing import Any

from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule

MOST = 1024   # kernels that are kept
_built: dict[Any, tuple[Any, tuple[Program, TileSchedule, Target]]] = {}     # and of what


def build(program: Program, schedule: TileSchedule, target: Target) -> Any:
    """The kernel of a program. Raises `ScheduleError` for a schedule that cannot be, with the arithmetic."""
    key = program.key, schedule, target if isinstance(target, CPU) else (target.arch, target.sm_count)
    if (found := _built.get(key)) is None:
        if len(_built) >= MOST: _built.pop(next(iter(_built)))
        found = _built[key] = make(program, schedule, target), (program, schedule, target)
    return found[0]


def find(text: str) -> tuple[Program, TileSchedule, Target] | None:
    """Returns what the kernel of a text was built of; None where none was."""
    return next((given for made, given in _built.values() if any(each.text == text for each in made.kernels)),
                None)


def make(program: Program, schedule: TileSchedule, target: Target) -> Any:
    """Builds a kernel of a program. Raises `ScheduleError`."""
    if isinstance(target, CPU):
        from tinygrad_nv.cpu.language.kernel import build as for_cpu
        return for_cpu(program, target.isa, target.threads)
    from tinygrad_nv.tile.language.gpu import build as for_gpu
    from tinygrad_nv.tile.language.gpu import problems
    if found := problems(program, schedule, target):
        raise ScheduleError(f"kernel {program.name} with {schedule} cannot be: {'; '.join(found)}",
                            "a schedule without these problems", "change its blocks, warps or stages")
    return for_gpu(program, schedule, target)
