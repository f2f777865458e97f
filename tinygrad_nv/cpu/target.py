"""Target of CPU kernels: instruction set, threads, caches.

Protocol: `host()` is what this process has now. NV_CPU_ISA narrows the instruction set; tinygrad's
NUM_CPU_THREADS is the number of threads (by default what the container and the affinity mask leave,
runtime/cpu/threads.py). Both are part of the key of schedules made with it.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tinygrad_nv.cpu.isa import ISA, detect
from tinygrad_nv.runtime.cpu.arguments import MOST_ARGUMENTS
from tinygrad_nv.runtime.cpu.threads import threads

if TYPE_CHECKING:
    from tinygrad_nv.quant.types import Layout

# where unknown: caches of a small core
_L1, _L2, _L3 = 32 << 10, 512 << 10, 4 << 20


@dataclass(frozen=True)
class CPU:
    """Target that a kernel is compiled for. Caches in bytes: `l1` and `l2` of one core, `l3` shared."""
    kind: ClassVar[str] = "cpu"
    head_bytes: ClassVar[int] = 1
    pointers: ClassVar[int] = 60     # of MOST_ARGUMENTS
    matrix_layout: ClassVar[Layout] = "tiles"
    isa: ISA
    threads: int
    l1_bytes: int = _L1
    l2_bytes: int = _L2
    l3_bytes: int = _L3

    @staticmethod
    def overfull(pointers: int, integers: int = 0, maps: int = 0) -> str:
        """Why no kernel can have so many arguments; "" where one can."""
        count = pointers + integers
        return f"a kernel of {count} arguments, at most {MOST_ARGUMENTS}" if count > MOST_ARGUMENTS else ""

    @property
    def arch(self) -> str:
        """The architecture that entries of the schedule database have."""
        return f"cpu {self.isa}, {self.threads} threads"

    @property
    def instructions(self) -> str:
        """Instructions that kernels can be made of; the number of threads is no part of it."""
        return str(self.isa)


def host() -> CPU:
    """The CPU of this process, as it is now. Raises `ConfigError` for an instruction set it lacks."""
    return CPU(detect(), threads(), *caches())


@functools.cache
def caches() -> tuple[int, int, int]:
    """Bytes of the caches of the first core, level 1 to 3, as Linux says; small ones where unknown."""
    found = {1: _L1, 2: _L2, 3: _L3}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "type").read_text().strip() == "Instruction": continue
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            found[level] = int(size.rstrip("KM")) << (20 if size.endswith("M") else 10)
        except (OSError, ValueError): continue
    return found[1], found[2], found[3]
