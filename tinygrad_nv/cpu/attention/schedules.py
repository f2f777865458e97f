"""How attention is computed on a CPU: the schedules of its templates."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.tile.schedule import count_words


@dataclass(frozen=True)
class CPUFlash(CPUSchedule):
    """A tile is `rows` queries of each of `heads` query heads of a key head, and goes through the keys in
    blocks of `block_n`."""
    rows: int = 6
    block_n: int = 128
    heads: int = 1
    template: ClassVar[str] = "flash"

    def words(self) -> list[str]:
        return [*super().words(), f"{self.rows}x{self.block_n}", count_words(self.heads, "head")]


@dataclass(frozen=True)
class CPUFlashBackward(CPUSchedule):
    """Blocks of `block_m` queries and of `block_n` keys."""
    block_m: int = 48
    block_n: int = 64
    template: ClassVar[str] = "flash_backward"

    def words(self) -> list[str]: return [*super().words(), f"{self.block_m}x{self.block_n}"]
