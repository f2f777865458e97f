"""How rows are multiplied with the matrices of their groups on a GPU."""
from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Self

from tinygrad_nv.tile.gemm.schedules import Gemv, Mma, Wgmma
from tinygrad_nv.tile.grouped_gemm.spec import GROUP
from tinygrad_nv.tile.schedule import RowWarps, Schedule


@dataclass(frozen=True)
class GroupedGemv(RowWarps, Schedule):
    """Few rows a group (gemv/): `rows` rows of a group by `block_n` columns, `block_k` of the sum a warp and
    iteration; `splits` CTAs share a sum."""
    rows: int = 8
    block_n: int = 64
    block_k: int = 128
    warps_m: int = 8
    splits: int = 1
    template: ClassVar[str] = "grouped_gemv"

    @classmethod
    def of(cls, gemv: Gemv, rows: int) -> Self:
        """Returns the schedule as a matmul of so many rows is computed."""
        return cls(gemv.warps_m, rows, gemv.block_n, gemv.block_k, gemv.splits)

    @property
    def gemv(self) -> Gemv:
        """The schedule of a tile's matmul."""
        return Gemv().columns(self.block_n).k(self.block_k).warps(self.warps_m).split(self.splits)

    @property
    def near(self) -> tuple[Self, ...]:
        made = [replace(self, rows=rows) for rows in (self.rows // 2, 2 * self.rows) if rows]
        made += [replace(self, block_n=n) for n in (self.block_n // 2, 2 * self.block_n) if n]
        return (*made, *(replace(self, block_k=k) for k in (self.block_k // 2, 2 * self.block_k) if k))

    def words(self) -> list[str]:
        made = [f"{self.rows}x{self.block_n}x{self.block_k}", self.warp_words()]
        return [*made, f"split {self.splits}"] if self.splits > 1 else made


@dataclass(frozen=True)
class GroupedMma(Mma):
    """mma.sync (mma/): `block_m` rows of a group by `block_n` columns, those of gate and up together."""
    template: ClassVar[str] = "grouped_mma"

    @property
    def mma(self) -> Mma:
        """The schedule of a matmul."""
        return Mma(**asdict(self))


@dataclass(frozen=True)
class GroupedTransposedMma(GroupedMma):
    """Schedule of `grouped_mma` for matrices (K, N)."""
    template: ClassVar[str] = "grouped_transposed_mma"


@dataclass(frozen=True)
class GroupedOuterMma(GroupedMma):
    """mma.sync of sums of outer products (outer_mma/): `block_m` columns of y by `block_n` of x, `block_k`
    rows of a group at a time."""
    template: ClassVar[str] = "grouped_outer_mma"


@dataclass(frozen=True)
class GroupedWgmma(Wgmma):
    """wgmma (wgmma/): `block_m` rows of a group by `block_n` columns, those of gate and up together; swapped,
    `block_m` columns, those of gate and up together, by `block_n` rows. `group` tiles of rows of one matrix
    are computed together, so that it stays in L2."""
    group: int = 16
    template: ClassVar[str] = "grouped_wgmma"


@dataclass(frozen=True)
class GroupedTransposedWgmma(GroupedWgmma):
    """Schedule of `grouped_wgmma` for matrices (K, N)."""
    template: ClassVar[str] = "grouped_transposed_wgmma"


@dataclass(frozen=True)
class GroupedOuterWgmma(Wgmma):
    """wgmma of sums of outer products (outer_wgmma/): `block_m` columns of y by `block_n` of x, `block_k`
    rows of a group at a time."""
    template: ClassVar[str] = "grouped_outer_wgmma"


@dataclass(frozen=True)
class GroupedScaledWgmma(GroupedWgmma):
    """Schedule of `grouped_wgmma` for 8-bit floats with scales: a stage is a group of K."""
    block_k: int = GROUP
    template: ClassVar[str] = "grouped_scaled_wgmma"
