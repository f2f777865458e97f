"""How rows are multiplied with the matrices of their groups on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.grouped_gemm.spec import GROUP


@dataclass(frozen=True)
class GroupedWgmma(Wgmma):
    """wgmma (wgmma/): `block_m` rows of a group by `block_n` columns, those of gate and up together; swapped,
    `block_m` columns, those of gate and up together, by `block_n` rows. `group` tiles of rows of one matrix
    are computed together, so that it stays in L2."""
    group: int = 16
    template: ClassVar[str] = "grouped_wgmma"


@dataclass(frozen=True)
class GroupedScaledWgmma(GroupedWgmma):
    """The same of 8-bit floats with scales: a stage is a group of K."""
    block_k: int = GROUP
    template: ClassVar[str] = "grouped_scaled_wgmma"
