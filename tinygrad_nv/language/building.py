"""Kernels of programs, built once for each target."""
from __future__ import annotations

from typing import Any

from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule

MOST = 1024   # kernels that are kept
_built: dict[Any, Any] = {}


def build(program: Program, schedule: TileSchedule, target: Target) -> Any:
    """The kernel of a program. Raises `ScheduleError` for a schedule that cannot be, with the arithmetic."""
    key = program.key, schedule, target if isinstance(target, CPU) else (target.arch, target.sm_count)
    if (made := _built.get(key)) is None:
        if len(_built) >= MOST: _built.pop(next(iter(_built)))
        made = _built[key] = _make(program, schedule, target)
    return made


def _make(program: Program, schedule: TileSchedule, target: Target) -> Any:
    if isinstance(target, CPU):
        from tinygrad_nv.cpu.language.kernel import build as for_cpu
        return for_cpu(program, target.isa, target.threads)
    from tinygrad_nv.tile.language.gpu import build as for_gpu
    from tinygrad_nv.tile.language.gpu import problems
    if found := problems(program, schedule, target):
        raise ScheduleError(f"kernel {program.name} with {schedule} cannot be: {'; '.join(found)}",
                            "a schedule without these problems", "change its blocks, warps or stages")
    return for_gpu(program, schedule, target)
