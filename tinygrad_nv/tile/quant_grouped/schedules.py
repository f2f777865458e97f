"""How rows are multiplied with the quantised matrices of their groups on a GPU."""
from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Self

from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv, QuantMma
from tinygrad_nv.tile.schedule import count_words


@dataclass(frozen=True)
class QuantGroupedGemv(QuantGemv):
    """Few rows a group (gemv/): `rows` of a group, by the `tiles` tiles of 16 columns that a CTA has."""
    rows: int = 8
    template: ClassVar[str] = "quant_grouped_gemv"

    def by(self, rows: int) -> Self:
        """Rows of a CTA."""
        return replace(self, rows=rows)

    @property
    def gemv(self) -> QuantGemv:
        """The schedule of a tile's matmul."""
        return QuantGemv(self.warps_m, self.tiles, self.units, self.splits)

    def words(self) -> list[str]: return [count_words(self.rows, "row"), *super().words()]


@dataclass(frozen=True)
class QuantGroupedMma(QuantMma):
    """mma.sync (mma/): `block_m` rows of a group by `block_n` columns, those of gate and up together."""
    template: ClassVar[str] = "quant_grouped_mma"

    @property
    def mma(self) -> QuantMma:
        """The schedule of a matmul."""
        return QuantMma(**asdict(self))


@dataclass(frozen=True)
class QuantGroupedWgmma(GroupedWgmma):
    """wgmma (wgmma/): `block_m` columns, those of gate and up together, by `block_n` rows of a group."""
    swap: bool = True
    template: ClassVar[str] = "quant_grouped_wgmma"
