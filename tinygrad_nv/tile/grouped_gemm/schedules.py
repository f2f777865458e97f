"""How rows are multiplied with the matrices of their groups on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.gemm.schedules import Wgmma


@dataclass(frozen=True)
class GroupedWgmma(Wgmma):
    """wgmma (wgmma/): `block_m` rows of a group by `block_n` columns, those of gate and up together; swapped,
    `block_m` columns, those of gate and up together, by `block_n` rows. `group` tiles of rows of one matrix
    are computed together, so that it stays in L2."""
    group: int = 16
    template: ClassVar[str] = "grouped_wgmma"
