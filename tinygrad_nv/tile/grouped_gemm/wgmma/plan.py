"""Plan of `grouped_wgmma`, which follows from a spec and a schedule: tiles, boxes, bytes. Numbers only.

Protocol: that of gemm/wgmma/plan.py, of the matmul of one group. A tile has `tokens` rows of a group and
`tile_columns` columns of the result. Without `swap` rows are the left operand, and gate and up lie side by
side in the right one. With it each consumer has 64 columns, or a multiple, of gate and then of up, so that a
thread holds both of its elements.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.store_plan import Panel, span_of
from tinygrad_nv.tile.wgmma_tiles import MOST_BOX, OperandTile

ROW_BYTES = 128     # of K in a box
LOADERS = 96        # threads that gather rows: those of the producer's warpgroup beside TMA's warp
CHUNK = 16          # bytes that a thread copies
CHUNKS = ROW_BYTES // CHUNK
LANES = 32
MOST_EACH = 32      # groups that a lane counts


class Box(NamedTuple):
    """Part of a tile of a matrix: from `mn` of the tile on, `column` columns after the tile's first, of gate
    (`half` 0) or up. That of a matrix (K, N) has rows of K."""
    mn: int
    half: int
    column: int


def matrix_of(grouped: GroupedGemmSpec) -> Operand:
    """How a matrix lies in memory."""
    return Operand(grouped.dtype, *((1, grouped.n) if grouped.transposed else (grouped.k, 1)))


@dataclass(frozen=True)
class GroupedPlan(WgmmaPlan):
    """See above."""
    schedule: GroupedWgmma
    grouped: GroupedGemmSpec
    MOST_BOXES: ClassVar[int] = 1       # of K side by side in a stage
    MOST_ROWS: ClassVar[int] = MOST_BOX     # of the left operand's tile
    # sums a thread that ptxas keeps beside weights and places of the columns' rows
    MOST_SWAPPED: ClassVar[int] = 128

    @staticmethod
    @lru_cache(1024)
    def of(grouped: GroupedGemmSpec, s: GroupedWgmma) -> GroupedPlan:
        """The plan."""
        rows, matrix = Operand(grouped.dtype, grouped.k, 1), matrix_of(grouped)
        if s.swap:
            out = Result(grouped.out, 1, grouped.n)
            spec = GemmSpec(grouped.n, grouped.rows, grouped.k, matrix, rows, out)
        else:
            out = Result(grouped.out, grouped.columns, 1)
            spec = GemmSpec(grouped.rows, grouped.columns, grouped.k, rows, matrix, out,
                            parts=grouped.halves, part=grouped.columns * grouped.k)
        major = "MN" if grouped.transposed else "K"
        a, b = (OperandTile(grouped.dtype, major if s.swap == left else "K", extent, s.block_k, ROW_BYTES)
                for left, extent in ((True, s.block_m), (False, s.block_n)))
        return GroupedPlan(spec, s, a, b, grouped)

    # **** tiles ****

    @property
    def row_tile(self) -> OperandTile:
        """The operand that rows are."""
        return self.b if self.schedule.swap else self.a

    @property
    def matrix_tile(self) -> OperandTile: return self.a if self.schedule.swap else self.b

    @property
    def tokens(self) -> int:
        """Rows of a tile."""
        return self.row_tile.mn

    @property
    def tile_columns(self) -> int:
        """Columns of the result that a tile has."""
        return self.matrix_tile.mn // self.grouped.halves

    @property
    def tiles_across(self) -> int:
        """Tiles of one matrix's columns."""
        return -(-self.grouped.columns // self.tile_columns)

    @property
    def most_tiles(self) -> int:
        """Tiles there can be: each group may have one that is not full."""
        spec = self.grouped
        partial = min(spec.groups, spec.rows)
        return (partial + (spec.rows - partial) // self.tokens) * self.tiles_across

    @property
    def each(self) -> int:
        """Groups that a lane counts the tiles of."""
        return -(-self.grouped.groups // LANES)

    # **** loads ****

    @property
    def box_rows(self) -> int:
        """Rows of a box of a matrix."""
        if self.grouped.transposed: return self.matrix_tile.k
        shares = self.readers if self.schedule.swap and self.grouped.activation else 1
        return self.matrix_tile.mn // (self.grouped.halves * shares)

    @property
    def matrix_boxes(self) -> list[Box]:
        """Boxes of a tile of a matrix."""
        if self.grouped.transposed:
            inner = self.matrix_tile.inner
            return [Box(at, 0, at) for at in range(0, self.matrix_tile.mn, inner)]
        rows, halves = self.box_rows, self.grouped.halves
        return [Box((share * halves + half) * rows, half, share * rows)
                for share in range(self.matrix_tile.mn // (halves * rows)) for half in range(halves)]

    @property
    def gathers_rows(self) -> bool:
        """Whether threads copy rows from where they lie; else they are boxes."""
        return bool(self.grouped.gather)

    @property
    def arriving_bytes(self) -> int:
        """Bytes of a matrix that TMA brings to a stage."""
        return self.matrix_tile.nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a stage that TMA brings."""
        return self.arriving_bytes + (0 if self.gathers_rows else self.row_tile.nbytes)

    @property
    def b_start(self) -> int:
        """Offset at which the right operand's stages begin, behind the left one's."""
        return -(-self.a.nbytes * self.schedule.depth // 1024) * 1024

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages."""
        return self.b_start + self.schedule.depth * self.b.nbytes

    @property
    def loaders(self) -> int:
        """Threads beside TMA's warp that copy: gathered rows, and scales. Where all do not divide the copies
        of rows, 64 do: one that is predicated would be a branch in each stage."""
        if not self.gathers_rows and not self.grouped.scaled: return 0
        return LOADERS if not self.gathers_rows or self.tokens * CHUNKS % LOADERS == 0 else LOADERS - LANES

    @property
    def scale_bytes(self) -> int:
        """Bytes of a stage's scales: scales of its rows, and one of gate and of up, or of the matrix; in
        pairs."""
        return 4 * (self.tokens + 2) if self.grouped.scaled else 0

    @property
    def passes(self) -> int:
        """Copies that a thread makes of a tile of gathered rows."""
        return self.tokens * CHUNKS // self.loaders

    # **** stores ****

    @property
    def panel(self) -> Panel:
        """Results on their way: 16 rows of a warp, or with `swap` all rows and 64 columns of a consumer."""
        size = self.grouped.out.itemsize
        if self.schedule.swap: return Panel("N", self.tokens, 64 * size, 4)
        return Panel("N", 16, span_of(self.tile_columns * size), 1)

    @property
    def staging_bytes(self) -> int:
        """Shared memory of all panels."""
        return self.panel.nbytes * self.consumers * (1 if self.schedule.swap else 4)

    @property
    def table_bytes(self) -> int:
        """Shared memory of what is known of groups: three arrays, each at a multiple of 16."""
        return 4 * (2 * (LANES * self.each + 4) + LANES)
