"""Schedules for CPUs in the schedule database (tile/database.py).

Protocol: the architecture of an entry is instruction set and threads, its toolchain what identifies the C
compiler. Importing this module lets the database read such entries.
"""
from __future__ import annotations

import re
from typing import Any

from tinygrad_nv.cpu.gemm.candidates import problems
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.toolchain import find_compiler

NAMES = re.compile(r"cpu (\S+), [1-9]\d{0,4} threads")


def arch(isa: ISA, threads: int) -> str:
    """The architecture of a CPU, as entries have it."""
    return f"cpu {isa}, {threads} threads"


def toolchain() -> str:
    """What identifies the C compiler. Raises `ToolchainError` where there is none."""
    return find_compiler().identity


def lookup(spec: GemmSpec, target: CPU) -> CPUSchedule | None:
    """The winner for a product, where there is a legal one."""
    found = database.stored(spec, arch(target.isa, target.threads), toolchain)
    if not isinstance(found, CPUSchedule): return None
    return None if database.ignored(found, spec, problems(found, spec, target)) else found


def _read(data: Any, name: str) -> CPUSchedule:
    made, wanted = CPUSchedule.from_json(data), NAMES.fullmatch(name)
    if wanted is None or str(made.isa) != wanted[1]:
        raise ScheduleError(f"a schedule for {made.isa} in an entry of {name!r}")
    return made


database.add_architectures(NAMES, _read)
