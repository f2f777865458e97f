"""How a matmul with a quantised matrix is computed on a CPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.quant.types import TILE


@dataclass(frozen=True)
class QuantGemv(CPUSchedule):
    """Schedule of few rows (gemv.py): chunks of `block_n` outputs, `block_m` rows of a by `rows` of them at a
    time."""
    block_m: int = 1
    block_n: int = 0
    rows: int = 1
    template: ClassVar[str] = "quant_gemv"
    widens: ClassVar[bool] = True

    def words(self) -> list[str]:
        return [*super().words(), f"chunks of {self.block_n}", f"registers {self.block_m}x{self.rows}"]


@dataclass(frozen=True)
class QuantDots(CPUSchedule):
    """Schedule of a matrix in tiles (dots.py): `rows` rows of a at a time."""
    rows: int = 0
    template: ClassVar[str] = "quant_dots"

    def words(self) -> list[str]: return [*super().words(), f"{self.rows} rows at a time"]


@dataclass(frozen=True)
class CodesDots(CPUSchedule):
    """Schedule of codes times a matrix in tiles (codes.py): `rows` rows of a at a time."""
    rows: int = 0
    template: ClassVar[str] = "codes_dots"

    def words(self) -> list[str]: return [*super().words(), f"{self.rows} rows at a time"]


@dataclass(frozen=True)
class CodesAmx(CPUSchedule):
    """Schedule of codes times a matrix in tiles, by AMX tiles (codes_amx.py): blocks of `block_m` rows of
    a."""
    block_m: int = 0
    template: ClassVar[str] = "codes_amx"

    def words(self) -> list[str]: return [*super().words(), f"blocks of {self.block_m} rows"]


@dataclass(frozen=True)
class QuantAmx(CPUSchedule):
    """Schedule of a matrix in tiles, by AMX tiles (amx.py): blocks of `block_m` rows of a."""
    block_m: int = 0
    template: ClassVar[str] = "quant_amx"

    def words(self) -> list[str]: return [*super().words(), f"blocks of {self.block_m} rows"]


@dataclass(frozen=True)
class QuantPanels(CPUSchedule):
    """Schedule of a matrix in tiles, dequantised (panels.py): blocks of `block_m` rows of a, `rows` in
    registers."""
    block_m: int = 0
    rows: int = 0
    template: ClassVar[str] = "quant_panels"

    def words(self) -> list[str]:
        return [*super().words(), f"blocks of {self.block_m} rows", f"registers {self.rows}x{TILE}"]


@dataclass(frozen=True)
class QuantGemm(CPUGemm):
    """Schedule of many rows (blocked.py)."""
    template: ClassVar[str] = "quant_gemm"
