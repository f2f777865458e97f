"""How a spec is computed on a CPU.

Protocol: a `CPUSchedule` is frozen and hashable; spec, schedule and nothing else make a kernel. `parts` is in
how many pieces a kernel is called (one for each thread, or more); no bit of a result depends on it.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from tinygrad_nv.cpu.isa import ISA, LEVELS
from tinygrad_nv.errors import ScheduleError


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

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> CPUSchedule:
        """A schedule of plain data. Raises `ScheduleError` for what is not one."""
        numbers = [field.name for field in fields(CPUSchedule) if field.type == "int"]
        try:
            isa = ISA(**data["isa"])
            made = CPUSchedule(data["template"], isa, **{name: data[name] for name in numbers})
        except (KeyError, TypeError) as error:
            raise ScheduleError(f"{str(data)[:200]} is no schedule: {error}",
                                f"an object with template, isa, {', '.join(numbers)}") from error
        flags = (isa.bf16, isa.vnni, isa.emulated)
        if type(made.template) is not str or isa.level not in LEVELS \
                or any(type(x) is not bool for x in flags) \
                or any(type(getattr(made, name)) is not int for name in numbers):
            raise ScheduleError(f"{str(data)[:200]} is no schedule", "words and integers")
        return made

    def __str__(self) -> str:
        words = [f"{self.template} {self.isa}", f"{self.parts} part{'s' if self.parts > 1 else ''}"]
        blocks = [str(n) for n in (self.block_m, self.block_n, self.block_k)]
        if any((self.block_m, self.block_n, self.block_k)): words.append(f"block {'x'.join(blocks)}")
        if self.rows or self.columns: words.append(f"registers {self.rows}x{self.columns}")
        return ", ".join(words)
