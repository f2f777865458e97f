"""Sums of mma.sync to rows of the result: bias, activation, weight, and each row's place.

Protocol: a lane has rows g and g + 8 of 16, columns 2q and 2q + 1 of 8 (g = lane / 4, q = lane % 4). Places
and weights of its rows are read first, then biases, columns by columns.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, write
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.work import Tile
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.store_plan import Cell


def store_rows(kernel: MmaKernel, finish: GroupedEpilogue, tile: Tile) -> None:
    """Stores what a warp of a kernel has of a tile."""
    k, spec = kernel, finish.spec
    cells = [Cell(16 * i, 8 * j, [part[i][j] for part in k.sums])
             for i in range(k.warp_m // 16) for j in range(k.warp_n // 8)]
    RowStore(k.kb, spec, finish, tile, k.out, edges=spec.columns % k.columns > 0).write(
        k.row, k.first_n + k.column, cells)


@dataclass(frozen=True)
class Row:
    """A lane's row: where it begins, whether the group has it, its weight."""
    start: Value
    there: Value
    weight: Value | None


@dataclass(frozen=True)
class RowStore:
    """Stores what a warp has of a tile; `edges`: tiles may reach beyond the last column."""
    kb: Kernel
    spec: GroupedGemmSpec
    finish: GroupedEpilogue
    tile: Tile
    out: Value
    edges: bool

    def write(self, first_row: Value, first_column: Value, cells: Sequence[Cell]) -> None:
        """Cells of a warp whose share begins at `first_row` of the tile and `first_column` of the result."""
        kb, lane = self.kb, self.kb.special("laneid")
        row, column = first_row + (lane >> 2), first_column + ((lane & 3) << 1)
        with kb.comment("places and weights of rows"):
            rows = {at: self.row(row + at if at else row, column)
                    for at in sorted({cell.row + 8 * half for cell in cells for half in range(2)})}
        for at in dict.fromkeys(cell.column for cell in cells):
            with kb.comment(f"columns {at} to {at + 7}"): self.columns(
                [cell for cell in cells if cell.column == at], rows, column + at if at else column, at)

    def row(self, row: Value, column: Value) -> Row:
        """A row's place, from the lane's first column on."""
        kb, spec, finish, size = self.kb, self.spec, self.finish, self.spec.dtype.itemsize
        there, own = row < self.tile.rows, self.tile.first + row
        slot = own
        if finish.order is not None:
            slot = kb.reg("u32", 0)
            kb.emit("ld.global.u32", slot, advance(kb, finish.order, own, 4).at(), guard=there)
        weight = None
        if finish.weights is not None:
            weight = kb.reg("f32", 0.0)
            kb.emit("ld.global.f32", weight, advance(kb, finish.weights, slot, 4).at(), guard=there)
        start = advance(kb, self.out, finish.place(own, slot), spec.columns * size)
        return Row(advance(kb, start, column, size), there, weight)

    def columns(self, cells: Sequence[Cell], rows: dict[int, Row], column: Value, at: int) -> None:
        """Eight columns of all rows; `column` is the lane's first of them."""
        kb, spec, size = self.kb, self.spec, self.spec.dtype.itemsize
        pairs = spec.columns % 2 == 0
        inside = [column + more < spec.columns if more else column < spec.columns for more in range(2)] \
            if self.edges else [None, None]
        bias = self.finish.biases(self.tile.group, column, inside, pairs)
        for cell in cells:
            for half in range(2):
                place = rows[cell.row + 8 * half]
                made = [self.finish.value([part[2 * half + i] for part in cell.sums],
                                          [each[i] for each in bias], place.weight) for i in range(2)]
                value = Lanes(kb, spec.dtype, [*made])
                guards = [place.there if each is None else place.there & each for each in inside]
                if pairs: write(kb, place.start, at * size, value, 2, guards[0])
                else:
                    for i, guard in enumerate(guards):
                        write(kb, place.start, (at + i) * size, value, 1, guard, first=i)
