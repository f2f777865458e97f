"""The templates of a matmul, by name: mma/ (sm_80 and later, any strides), wgmma/ (sm_90a), gemv/ (few rows).

`build` chooses by the schedule's template. Templates are imported when they are asked for.
"""
from __future__ import annotations

from importlib import import_module

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.schedule import Schedule

FAMILIES = {"mma": "gemm_mma", "wgmma": "gemm_wgmma", "gemv": "gemv"}
FILLING = ("wgmma",)  # their grids depend on how many CTAs run at once


def build(spec: GemmSpec, schedule: Schedule, arch: str, sm_count: int = 132,
          clusters: Clusters = ()) -> GemmKernel:
    """The kernel of a product, by the schedule's template, for a GPU with so many multiprocessors, which has
    room for so many `clusters` at once (left out: as ptx/gpcs.py has it). Raises `ScheduleError` for an
    impossible one."""
    family = FAMILIES.get(schedule.template)
    if family is None: raise ScheduleError(f"template {schedule.template!r}", f"one of {', '.join(FAMILIES)}")
    make = getattr(import_module(f"tinygrad_nv.tile.gemm.{schedule.template}.kernel"), family)
    gpu = (sm_count, clusters) if schedule.template in FILLING else ()
    made: GemmKernel = make(spec, schedule, arch, *gpu)
    return made
