"""Copies of one warpgroup to shared memory for the two others: queries once, tile after tile of latents.

Protocol: cp.async, 16 bytes a thread, into the swizzle that wgmma reads: eight neighbouring threads have a
row's 128 bytes, and the warpgroup 16 rows of one column of boxes. Each warp reads the table 32 entries at a
time, one a lane, and as many ahead of the first copies that need them. Rows
beyond the last, and keys outside low … high − 1, become zeros, and nothing of them is read. A thread's
arrival at the barrier comes when its copies have landed.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Shared, Value
from tinygrad_nv.tile.decode.latent.plan import LANES, ROWS, SPAN, WARPGROUP, LatentPlan
from tinygrad_nv.tile.decode.latent.tile_scheduler import LatentTile, LatentTileScheduler
from tinygrad_nv.tile.decode.plan import Parameters
from tinygrad_nv.tile.layout import OperandTile, SharedTile
from tinygrad_nv.tile.ops import CHUNK, swizzle_offset
from tinygrad_nv.tile.pipeline import Pipeline, PipelineState

ACROSS = SPAN // CHUNK          # threads of a row
AT_ONCE = WARPGROUP // ACROSS   # rows of a pass
SIZE = 2                        # bytes of an element


class LatentLoads:
    """The copies of a CTA; `thread` (u32) is the thread's number in its warpgroup."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters, thread: Value) -> None:
        self.kb, self.plan, self.given = kb, plan, given
        self.row, self.byte = thread // ACROSS, thread % ACROSS * CHUNK
        # the swizzle has the lowest three bits of a row: the same in all passes
        self.place = swizzle_offset(SharedTile(AT_ONCE, SPAN), self.row, self.byte)

    def run(self, work: LatentTileScheduler, ring: Pipeline, latents: Shared, q_ring: Pipeline,
            queries: Shared) -> None:
        """All copies. Queries come after the first tile of latents, which has room earlier."""
        kb, at, at_q = self.kb, ring.cursor(producer=True), q_ring.cursor(producer=True)
        start = latents.address() + self.place
        with work.work_tiles() as tile:
            rows = PagedRows(kb, self.plan, self.given, tile, self.row, self.byte)
            with kb.if_(tile.tiles <= 0): self._queries(queries, tile, q_ring, at_q)
            with kb.loop(0, tile.tiles, name="loaded") as number:
                full = ring.vacant(at)
                stage = start + at.stage * self.plan.keys.nbytes
                for row in rows.passes: self._row(self.plan.keys, stage, row, *rows.source(row))
                self._arrive(full)
                at.advance()
                with kb.if_(number == 0): self._queries(queries, tile, q_ring, at_q)
                rows.move()

    def _queries(self, target: Shared, tile: LatentTile, ring: Pipeline, at_q: PipelineState) -> None:
        """The 64 rows of a block."""
        kb, spec, q = self.kb, self.plan.spec, self.plan.spec.q
        full, at = ring.vacant(at_q), target.address() + self.place
        for first in range(0, ROWS, AT_ONCE):
            number = tile.block * ROWS + (self.row + first)
            elements = kb.reg("u64", q.offset)
            for index, stride in zip((tile.request, tile.head, number % spec.group, number // spec.group),
                                     (*q.batch, q.row), strict=True):
                elements = elements + index.to("u64") * stride
            source = self.given.q + (elements * 2 + self.byte.to("u64"))
            self._row(self.plan.queries, at, first, source, number >= spec.rows)
        self._arrive(full)
        at_q.advance()

    def _row(self, tile: OperandTile, target: Value, row: int, source: Value, outside: Value) -> None:
        """The thread's bytes of a row; zeros of one that is outside."""
        kb = self.kb
        for column in range(tile.columns):
            kb.emit("cp.async.cg.shared.global.L2::128B",
                    target.at(column * tile.column_bytes + row * SPAN), source.at(column * SPAN), CHUNK,
                    outside)

    def _arrive(self, full: MemoryOperand) -> None:
        self.kb.emit("cp.async.mbarrier.arrive.noinc.shared.b64", full)


class PagedRows:
    """A thread's rows of the next tile of keys: one of each pass. The lanes of a warp have `LANES` entries of
    the table, and have asked for as many more."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters, tile: LatentTile, row: Value,
                 byte: Value) -> None:
        self.kb, self.plan, self.bounds, spec = kb, plan, tile.bounds, plan.spec
        self.passes = range(0, plan.schedule.block_n, AT_ONCE)
        self.first = given.keys + (tile.head.to("u64") * spec.k.head + spec.k.offset) * SIZE + byte.to("u64")
        self.table = given.table + tile.request.to("u64") * (4 * spec.pages)
        self.key = kb.reg("s32", tile.first + row.to("s32"))
        self.entry = kb.reg("s32", tile.first // spec.page_size)    # that lane 0 has
        # of the keys of these entries; a window may begin in the middle of the first one's page
        self.end = kb.reg("s32", (self.entry + LANES) * spec.page_size)
        self.row, self.now, self.following = row.to("s32"), kb.reg("u32"), kb.reg("u32")
        self._read(self.now, 0)
        self._read(self.following, LANES)

    def _read(self, into: Value, beyond: int) -> None:
        """Entries from `beyond` on; of pages that no row sees 0."""
        kb, size, bounds = self.kb, self.plan.spec.page_size, self.bounds
        entry = self.entry + (kb.special("laneid").to("s32") + beyond)
        into.set(0)
        there = (entry * size < bounds.high) & (entry * size + size > bounds.low)
        kb.emit("ld.global.u32", into, (self.table + entry.to("u32").to("u64") * 4).at(), guard=there)

    def source(self, row: int) -> tuple[Value, Value]:
        """Returns where the thread's bytes of its row of a pass lie, and whether no row sees it."""
        kb, spec, made, page = self.kb, self.plan.spec, self.kb.reg("u64"), self.kb.reg("u32")
        key = self.key + row if row else self.key
        lane = (key // spec.page_size - self.entry).to("u32")
        kb.emit("shfl.sync.idx.b32", page, self.now, lane, 31, -1)
        kb.emit("mad.wide.u32", made, page, spec.k.page * SIZE, self.first)
        kb.emit("mad.wide.u32", made, key.to("u32") & (spec.page_size - 1), spec.k.token * SIZE, made)
        return made, (key < self.bounds.low) | (key >= self.bounds.high)

    def move(self) -> None:
        """To the next tile."""
        kb, size = self.kb, self.plan.spec.page_size
        self.key += self.plan.schedule.block_n
        with kb.if_(self.key - self.row >= self.end):
            self.entry += LANES
            self.end += LANES * size
            self.now.set(self.following)
            self._read(self.following, LANES)
