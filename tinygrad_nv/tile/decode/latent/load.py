"""What one warpgroup copies to shared memory for the two others: queries once, tile after tile of latents.

Protocol: cp.async, 16 bytes a thread, into the swizzle that wgmma reads: eight neighbouring threads have a
row's 128 bytes, and the warpgroup 16 rows of one column of boxes. Pages are as small as 8 tokens, so that
each thread looks its own rows' pages up, for the next tile while copies of this one are on their way. Rows
beyond the last, and keys outside low … high − 1, become zeros, and nothing of them is read. A thread's
arrival at the barrier comes when its copies have landed.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Shared, Value
from tinygrad_nv.tile.decode.copy import Bounds, evict_first
from tinygrad_nv.tile.decode.latent.plan import ROWS, SPAN, WARPGROUP, LatentPlan
from tinygrad_nv.tile.decode.plan import Parameters
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import CHUNK, swizzled
from tinygrad_nv.tile.pipeline import Pipeline
from tinygrad_nv.tile.wgmma_tiles import OperandTile

ACROSS = SPAN // CHUNK          # threads of a row
AT_ONCE = WARPGROUP // ACROSS   # rows of a pass


class LatentLoads:
    """The copies of a CTA; `thread` (u32) is the thread's number in its warpgroup."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters, thread: Value) -> None:
        self.kb, self.plan, self.given, self.policy = kb, plan, given, None
        self.row, self.byte = thread // ACROSS, thread % ACROSS * CHUNK
        # the swizzle has the lowest three bits of a row: the same in all passes
        self.place = swizzled(SharedTile(AT_ONCE, SPAN), self.row, self.byte)
        # latents that no other CTA reads need not stay in L2
        if plan.row_blocks == 1: self.policy = evict_first(kb)

    def queries(self, target: Shared, request: Value, head: Value, block: Value, full: MemoryOperand) -> None:
        """The 64 rows of a block."""
        kb, spec, q = self.kb, self.plan.spec, self.plan.spec.q
        at = target.address() + self.place
        for first in range(0, ROWS, AT_ONCE):
            number = block * ROWS + (self.row + first)
            elements = kb.reg("u64", q.offset)
            for index, stride in zip((request, head, number % spec.group, number // spec.group),
                                     (*q.batch, q.row), strict=True):
                elements = elements + index.to("u64") * stride
            source = self.given.q + (elements * 2 + self.byte.to("u64"))
            self._row(self.plan.queries, at, first, source, number >= spec.rows)
        self._arrive(full)

    def latents(self, ring: Pipeline, target: Shared, request: Value, head: Value, first: Value,
                tiles: Value, bounds: Bounds) -> None:
        """`tiles` tiles of keys from `first` (s32) on."""
        kb, plan, spec, n = self.kb, self.plan, self.plan.spec, self.plan.schedule.block_n
        size, start, at = 2, target.address() + self.place, ring.cursor(producer=True)
        source = self.given.keys + (head.to("u64") * spec.k.head + spec.k.offset) * size \
            + self.byte.to("u64")
        table = self.given.table + request.to("u64") * (4 * spec.pages)
        passes = range(0, n, AT_ONCE)
        pages, there = kb.regs("u32", len(passes)), kb.regs("pred", len(passes))
        key = kb.reg("s32", first + self.row.to("s32"))

        def look_up() -> None:
            """The pages of the thread's keys, and whether a row sees them."""
            for i, more in enumerate(passes):
                mine = key + more if more else key
                inside = (mine >= bounds.low) & (mine < bounds.high)
                kb.emit("mov.pred", there[i], inside)
                pages[i].set(0)
                entry = (mine.to("u32") // spec.page_size).to("u64") * 4
                kb.emit("ld.global.u32", pages[i], (table + entry).at(), guard=inside)

        look_up()
        with kb.loop(0, tiles, name="loaded"):
            full = ring.vacant(at)
            stage = start + at.stage * plan.keys.nbytes
            for i, more in enumerate(passes):
                row, within = kb.reg("u64"), (key + more).to("u32") & (spec.page_size - 1)
                kb.emit("mad.wide.u32", row, pages[i], spec.k.page * size, source)
                kb.emit("mad.wide.u32", row, within, spec.k.token * size, row)
                self._row(plan.keys, stage, more, row, ~there[i])
            self._arrive(full)
            at.advance()
            key += n
            look_up()

    def _row(self, tile: OperandTile, target: Value, row: int, source: Value, outside: Value) -> None:
        """The thread's bytes of a row; zeros of one that is outside."""
        kb, made = self.kb, outside
        if outside.negated:
            made = kb.reg("pred")
            kb.emit("not.pred", made, ~outside)
        hint = ".L2::cache_hint" if self.policy is not None else ""
        for column in range(tile.columns):
            kb.emit(f"cp.async.cg.shared.global{hint}.L2::128B",
                    target.at(column * tile.column_bytes + row * SPAN), source.at(column * SPAN), CHUNK, made,
                    *([] if self.policy is None else [self.policy]))

    def _arrive(self, full: MemoryOperand) -> None:
        self.kb.emit("cp.async.mbarrier.arrive.noinc.shared.b64", full)
