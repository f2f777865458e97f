"""How a matmul with a quantised matrix is computed on a GPU."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.schedule import RowWarps, Schedule, count_words


@dataclass(frozen=True)
class QuantGemv(RowWarps, Schedule):
    """Few rows (gemv/): `warps_m` warps take turns at units of K, `units` at a time, of the `tiles` tiles of
    16 columns that a CTA has. `splits` CTAs share them."""
    warps_m: int = 8
    tiles: int = 1
    units: int = 4
    splits: int = 1
    template: ClassVar[str] = "quant_gemv"

    def of(self, tiles: int, units: int) -> Self:
        """Tiles of a CTA, and units that a warp loads at a time."""
        return replace(self, tiles=tiles, units=units)

    def split(self, count: int) -> Self:
        """CTAs that share K."""
        return replace(self, splits=count)

    @property
    def block_n(self) -> int:
        """Columns of a CTA."""
        return 16 * self.tiles

    def words(self) -> list[str]:
        made = [f"{self.block_n} columns", self.warp_words(), count_words(self.units, "unit")]
        return [*made, f"split {self.splits}"] if self.splits > 1 else made


@dataclass(frozen=True)
class QuantWgmma(Wgmma):
    """wgmma (wgmma/): `block_m` rows of the matrix by `block_n` rows of activations."""
    template: ClassVar[str] = "quant_wgmma"


@dataclass(frozen=True)
class QuantMma(Mma):
    """mma.sync (mma/): `block_m` rows of activations by `block_n` columns, those of all parts."""
    template: ClassVar[str] = "quant_mma"
