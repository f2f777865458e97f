"""Grouped matmuls with mma.sync (spec.py): the ring of gemm/mma, whose tiles of rows belong to a group each.
For sm_80 and later, any extents.

    wait for the kernel before
    the group and the rows of this CTA, from the offsets (work.py); a CTA without any ends
    as gemm/mma: rows of A are copied from where they lie in x, rows that the group lacks are zeros
    bias, activation, weight; each row to its place

CTAs walk the tiles in groups of rows, so that those at work together share a group's matrix in L2.

A lane has rows g and g + 8 of 16, columns 2q and 2q + 1 of 8 (g = lane / 4, q = lane % 4). Places
and weights of its rows are read first, then biases, columns by columns.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance, write
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.mma.plan import whole
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedMma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.work import Tile, tile_of
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.ops import TileCopy, width_of
from tinygrad_nv.tile.store_plan import Cell
from tinygrad_nv.tile.template import GPU


def grouped_mma(spec: GroupedGemmSpec, schedule: GroupedMma, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; x; w; offsets; order, weights, bias, where the spec has
    them."""
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return GroupedMmaKernel(kb, MmaPlan.of(whole(spec, schedule), schedule.mma), spec).emit_kernel()


class GroupedMmaKernel(MmaKernel):
    """A matmul's kernel whose tiles belong to a group each."""

    def __init__(self, kb: Kernel, plan: MmaPlan, grouped: GroupedGemmSpec) -> None:
        self.grouped = grouped
        super().__init__(kb, plan)

    def declare_params(self) -> tuple[Value, Value]:
        self.finish = GroupedEpilogue(self.kb, self.grouped)
        return self.finish.x, self.finish.matrices["w"]

    def make_copies(self, x: Value, w: Value) -> None:
        """The copies of rows of x, then of each half of the group's matrix."""
        kb, spec, s, size = self.kb, self.spec, self.schedule, self.spec.b.dtype.itemsize
        if kb.hopper: kb.wait_for_previous_grid()
        self.tile = tile_of(kb, self.grouped, self.finish.offsets, self.scheduler.m, s.block_m)
        residue = spec.k % s.block_k or s.block_k
        read_rows = self.rows_read()
        rows = GatheredCopy(kb, spec.a, self.x_of(x), kb.reg("u32", 0), read_rows.rows, residue,
                            width_of(spec.a, 1, residue), s.block_m, s.block_k, 0, self.finish, read_rows)
        matrix = self.matrix(w)
        made: list[TileCopy] = [rows]
        for part in range(spec.parts):
            start = made[-1].start + made[-1].tile.nbytes
            made.append(TileCopy(kb, spec.b, matrix + part * spec.part * size if part else matrix,
                                 self.first_n, spec.n, residue, width_of(spec.b, spec.n, residue),
                                 self.columns, s.block_k, start))
        self.copies = self.tiles = made
        self.stage_bytes = made[-1].start + made[-1].tile.nbytes

    def rows_read(self) -> Tile:
        """The rows of the tile whose x is read."""
        return self.tile

    def x_of(self, x: Value) -> Value:
        """Returns the address at which rows of x begin."""
        return x

    def matrix(self, w: Value) -> Value:
        """The group's."""
        size = self.grouped.n * self.spec.k * self.spec.b.dtype.itemsize
        return advance(self.kb, w, self.tile.group, size)

    def store(self) -> None:
        store_rows(self, self.finish, self.tile)


@dataclass
class GatheredCopy(TileCopy):
    """Copies rows of x that the rows of a tile of a group are."""
    finish: GroupedEpilogue
    of: Tile

    def __post_init__(self) -> None:
        super().__post_init__()
        kb, pitch = self.kb, self.operand.mn * self.size
        self.sources: dict[int, Value] = {}
        for row in sorted({self.where(i)[0] for i in range(self.passes)}):
            own = self.row + row if row else self.row
            source = self.finish.source(self.of.first + own, own < self.of.rows)
            self.sources[row] = advance(kb, self.pointer, source, pitch) + self.byte.to("u64")
        self.source = self.sources[0]   # what `ask` has L2 fetch

    def _advance(self, elements: Value | int) -> None:
        assert isinstance(elements, int)
        for each in self.sources.values(): each += elements * self.size

    def _at(self, row: int, column: int) -> MemoryOperand: return self.sources[row].at(column)


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
