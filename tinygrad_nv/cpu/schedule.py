"""How a spec is computed on a CPU.

Protocol: a `CPUSchedule` is frozen and hashable; spec, schedule and nothing else make a kernel. `parts` is in
how many pieces a kernel is called (one for each thread, or more); no bit of a result depends on it.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.cpu.isa import ISA


@dataclass(frozen=True)
class CPUSchedule:
    """`template` names the kernel family. `block_m`, `block_n`, `block_k` are what a part keeps in its
    caches; `rows` and `columns` what the innermost loop keeps in registers, columns in elements. 0 where a
    template has no such number."""
    template: str
    isa: ISA
    parts: int = 1
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    rows: int = 0
    columns: int = 0

    def __str__(self) -> str:
        words = [f"{self.template} {self.isa}", f"{self.parts} part{'s' if self.parts > 1 else ''}"]
        blocks = [str(n) for n in (self.block_m, self.block_n, self.block_k)]
        if any((self.block_m, self.block_n, self.block_k)): words.append(f"block {'x'.join(blocks)}")
        if self.rows or self.columns: words.append(f"registers {self.rows}x{self.columns}")
        return ", ".join(words)
