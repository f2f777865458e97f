"""The producer's copies: boxes of matrices, and rows of x as boxes or one by one.

Protocol: `begin(tile)` at each tile, then `issue(stage, full)` for each stage of its K in turn. Rows that lie
in order come by TMA; those after the group's last belong to the next group, and are never stored. Gathered
rows come by cp.async, `RowGather`, into the swizzle that TMA would have made: eight neighbouring lanes have a
row's 128 bytes. Lanes beyond the group's last row read nothing and leave zeros: were they to copy that row
again, all of them on all SMs would ask one slice of L2 for the same line (an H100 took 1.3 to 1.8 times as
long where groups have about as many rows as a tile).
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import CHUNK, CHUNKS, ROW_BYTES, GroupedPlan, matrix_of
from tinygrad_nv.tile.grouped_gemm.wgmma.tile_scheduler import GroupTile
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import SharedTile, map_argument
from tinygrad_nv.tile.ops import swizzle_offset

X, W = 1, 2     # pointers of the kernel


class RowPlaces:
    """Places of a tile's rows in x; `order` None: in their order."""

    def __init__(self, kb: Kernel, plan: GroupedPlan, order: Value | None) -> None:
        self.kb, self.gather, self.order = kb, plan.grouped.gather, order

    def source(self, tile: GroupTile, row: Value) -> Value:
        """The row of x of a row; beyond the group's last, of that."""
        kb, clamped = self.kb, self.kb.reg("u32")
        kb.emit("min.u32", clamped, row, tile.end - 1)
        if not self.gather or self.order is None: return clamped
        slot = kb.ld("global", "u32", advance(kb, self.order, clamped, 4).at())[0]
        return slot // self.gather if self.gather > 1 else slot


class GroupedLoads:
    """Copies by TMA; one thread."""

    def __init__(self, kb: Kernel, plan: GroupedPlan) -> None:
        self.kb, self.plan, spec = kb, plan, plan.grouped
        self.ring = kb.shared("ring", plan.ring_bytes, align=1024)
        self.starts = self.ring.address(), self.ring.address(plan.b_start)
        self.matrix_start, self.row_start = self.starts if plan.schedule.swap else self.starts[::-1]
        self.maps: list[MapArgument] = []
        self.tensor_maps: list[Value] = []
        self.declare_matrices()
        if not plan.gathers_rows:
            self.maps.append(map_argument(Operand(spec.dtype, spec.k, 1), plan.row_tile, X, spec.x_rows,
                                          spec.k, (), plan.tokens))
            self.tensor_maps.append(kb.tensor_map("map_x"))
        self.at_k = kb.reg("s32")

    def declare_matrices(self) -> None:
        """The maps of the matrices."""
        plan, spec = self.plan, self.plan.grouped
        matrix = replace(matrix_of(spec), batch=(spec.n * spec.k,))
        self.maps.append(map_argument(matrix, plan.matrix_tile, W, spec.n, spec.k, (spec.groups,),
                                      plan.box_rows))
        self.tensor_maps.append(self.kb.tensor_map("map_w"))

    def begin(self, tile: GroupTile) -> None:
        """The next stages are of a tile."""
        self.at_k.set(0)
        self.tile = tile

    def issue(self, stage: Value, full: MemoryOperand) -> None:
        """Copies of one stage, which arrive at the barrier `full`; K moves on."""
        plan = self.plan
        self.issue_matrix(stage, full)
        if not plan.gathers_rows:
            start, row = self.row_start + stage * plan.row_tile.nbytes, self.tile.row.to("s32")
            for box in range(plan.row_tile.columns):
                at_k = self.at_k + box * plan.row_tile.inner if box else self.at_k
                self.kb.tma_load(start.at(box * plan.row_tile.column_bytes), self.tensor_maps[-1],
                                 [at_k, row], full)
        self.at_k += plan.schedule.block_k

    def issue_matrix(self, stage: Value, full: MemoryOperand) -> None:
        """Issues the loads of the matrix of the tile's group."""
        kb, plan, tile = self.kb, self.plan, self.tile
        start = self.matrix_start + stage * plan.matrix_tile.nbytes
        matrices = [plan.grouped.groups] if plan.grouped.groups > 1 else []
        for box in plan.matrix_boxes:
            column = (tile.column + (box.half * plan.grouped.columns + box.column)).to("s32")
            place = [column, self.at_k] if plan.grouped.transposed else [self.at_k, column]
            kb.tma_load(start.at(plan.matrix_tile.at_mn(box.mn)), self.tensor_maps[0],
                        [*place, *(tile.group.to("s32") for _ in matrices)], full)


class RowGather:
    """Copies of gathered rows by the plan's `loaders`."""

    def __init__(self, kb: Kernel, plan: GroupedPlan, x: Value, places: RowPlaces, start: Value) -> None:
        self.kb, self.plan, self.x, self.sources = kb, plan, x, places
        thread = kb.tid.x - (plan.schedule.threads - plan.loaders)
        self.chunk, self.row = thread % CHUNKS * CHUNK, thread // CHUNKS
        tile, rows = SharedTile(plan.tokens, ROW_BYTES), plan.loaders // CHUNKS
        # the swizzle has the lowest three bits of a row: two passes later it is the same
        self.rows, self.apart = rows, rows if rows % 8 else 0
        self.places = [start + swizzle_offset(tile, self.row + more, self.chunk)
                       for more in dict.fromkeys((0, self.apart))]
        self.offsets = kb.regs("u32", plan.passes)
        self.inside = kb.reg("s32")     # rows of the group from this thread's first on
        self.left = kb.reg("s32") if plan.grouped.k % plan.schedule.block_k else None

    def begin(self, tile: GroupTile) -> None:
        """The next stages are of a tile."""
        kb, spec = self.kb, self.plan.grouped
        pitch = spec.k * spec.dtype.itemsize
        self.at = kb.reg("u64", self.x)
        if self.left is not None: self.left.set(pitch - self.chunk.to("s32"))
        sources = [self.sources.source(tile, tile.row + (self.row + i * self.rows))
                   for i in range(self.plan.passes)]
        self.inside.set((tile.end - tile.row - self.row).to("s32"))
        for offset, source in zip(self.offsets, sources, strict=True):
            offset.set(source * pitch + self.chunk)

    def issue(self, stage: Value) -> None:
        """Copies into a stage; K moves on."""
        kb, tile = self.kb, self.plan.row_tile
        places = [place + stage * tile.nbytes for place in self.places]
        beyond = [None if self.left is None else self.left <= box * ROW_BYTES for box in range(tile.columns)]
        for i, offset in enumerate(self.offsets):
            which = i % len(places)
            source, outside = self.at + offset.to("u64"), self.inside <= i * self.rows
            for box, end in enumerate(beyond):
                place = places[which].at(box * tile.column_bytes + (i - which) * self.rows * ROW_BYTES)
                kb.emit("cp.async.cg.shared.global", place, source.at(box * ROW_BYTES), CHUNK,
                        outside if end is None else outside | end)
        self.at += tile.columns * ROW_BYTES
        if self.left is not None: self.left -= tile.columns * ROW_BYTES
