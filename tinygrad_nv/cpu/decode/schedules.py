"""How decode attention is computed on a CPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.schedule import CPUSchedule


@dataclass(frozen=True)
class CPUDecode(CPUSchedule):
    """`split_keys` keys of a request at a time, for `block_rows` rows of a key head, a divisor of their
    number (0: all). `divided`: units of work are splits, combined by a second kernel; else blocks of
    rows."""
    split_keys: int = 256
    block_rows: int = 0
    divided: bool = False
    template: ClassVar[str] = "decode"
    widens: ClassVar[bool] = True

    def words(self) -> list[str]:
        rows = [f"{self.block_rows} rows"] if self.block_rows else []
        return [*super().words(), *rows, f"splits of {self.split_keys} keys", *["combined"] * self.divided]
