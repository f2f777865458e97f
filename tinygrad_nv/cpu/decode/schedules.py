"""How decode attention is computed on a CPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.schedule import CPUSchedule


@dataclass(frozen=True)
class CPUDecode(CPUSchedule):
    """`split_keys` keys of a request at a time. `divided`: units of work are splits, combined by a second
    kernel; else key heads of a request."""
    split_keys: int = 256
    divided: bool = False
    template: ClassVar[str] = "decode"
    widens: ClassVar[bool] = True

    def words(self) -> list[str]:
        return [*super().words(), f"splits of {self.split_keys} keys", *["combined"] * self.divided]
