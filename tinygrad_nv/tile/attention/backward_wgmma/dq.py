"""A warp's share of dq, added to memory: by way of its own shared memory, and from there by TMA; or, where
there is no room, from registers.

Protocol: of a block a warp has 16 rows, of all columns or of its consumer's. Registers 4j … 4j + 3 of the
fragment are columns 8j + 2q and 8j + 2q + 1 of rows g and g + 8, in the order in which dS has its rows
(main_loop.py): lanes of g = i + 4o have row 2i + o. They go as pairs to boxes of 32
columns with the 128-byte swizzle, 16 rows each, that TMA adds to dq; the map cuts off rows and columns that
are none. The warp waits for its boxes to be read before it writes them again, a block later.

A deterministic sum has turns: of each warp's share of each block of rows a counter says how many CTAs have
added theirs. CTAs add in the order of their keys, which is that in which they start, so that none waits for
one that cannot start. What a block has added is made known when the next one's sums are there.
"""
from __future__ import annotations

from abc import ABC, abstractmethod

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.attention.backward_wgmma.plan import DQ_COLUMNS, WARP_ROWS, BackwardWgmmaPlan
from tinygrad_nv.tile.attention.blocks import BlockPosition, RowBlocks
from tinygrad_nv.tile.launch import MapArgument

BOX_BYTES = WARP_ROWS * DQ_COLUMNS * 4


class QueryMap:
    """The tensor map of dq: dense, all heads one after the other."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan) -> None:
        one = plan.spec.forward
        pitch = one.d * 4
        integer = one.symbolic.index("s_q") if "s_q" in one.symbolic else -1
        self.map = MapArgument(0, "f32", (one.d, one.s_q, one.matrices), (pitch, pitch * one.s_q),
                               (DQ_COLUMNS, WARP_ROWS, 1), "128B", 0, 1 if integer >= 0 else -1, integer)
        self.tensor_map = kb.tensor_map("map_dq")


class QuerySums(ABC):
    """Sums of one warp; `warp` (u32) is its number among the consumers', `head` (u32) the number of the first
    query head in the whole batch."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, turns: Value | None, blocks: RowBlocks,
                 warp: Value,
                 head: Value) -> None:
        self.kb, self.plan, self.turns, self.blocks = kb, plan, turns, blocks
        self.warp, self.head = warp, head
        self.sums = kb.regs("f32", plan.dq_columns // 2)
        self.turn = kb.reg("u64", 0)  # the counter of the block before

    @abstractmethod
    def add(self, position: BlockPosition) -> None:
        """Adds the sums of the walker's block."""

    @abstractmethod
    def drain(self) -> None:
        """One lane: waits for what is on its way, after the last block."""

    def _place(self, position: BlockPosition) -> tuple[Value, Value]:
        """The first of the warp's rows, and of its columns (s32)."""
        kb, plan = self.kb, self.plan
        warp_row = self.warp & 3 if plan.shares_rows else self.warp
        row = position.row + (warp_row * WARP_ROWS).to("s32")
        return row, (self.warp >> 2).to("s32") * plan.dq_columns if plan.shares_rows else kb.reg("s32", 0)

    def _take_turn(self, turns: Value, position: BlockPosition) -> None:
        """One lane: waits until the CTAs before this one have added theirs."""
        kb, plan, seen = self.kb, self.plan, self.kb.reg("u32")
        block = (self.head + position.head) * plan.blocks_of_rows + position.block.to("u32")
        self.turn.set(turns + (block * (4 * plan.consumers) + self.warp).to("u64") * 4)
        before = self.blocks.key // plan.schedule.block_n - self.blocks.first_keys(position.row)
        kb.emit("ld.acquire.gpu.global.u32", seen, self.turn.at())
        with kb.while_(lambda: seen != before.to("u32")):
            kb.emit("ld.acquire.gpu.global.u32", seen, self.turn.at())

    def _give_turn(self) -> None:
        """One lane: lets the next CTA add its own."""
        self.kb.emit("red.release.gpu.global.add.u32", self.turn.at(), 1)


class BoxedSums(QuerySums):
    """By TMA."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, to: QueryMap, turns: Value | None,
                 blocks: RowBlocks, warp: Value,
                 head: Value) -> None:
        super().__init__(kb, plan, turns, blocks, warp, head)
        self.to = to
        shared = kb.shared("dq_staging", 4 * plan.consumers * plan.warp_staging_bytes, align=1024)
        self.staging = shared.address() + warp * plan.warp_staging_bytes
        lane = kb.special("laneid")
        row = (lane >> 2 & 3) * 2 + (lane >> 4)
        self.place = self.staging + (row * 128 + ((lane & 3) << 3) ^ (row << 4))

        if plan.dq_columns % DQ_COLUMNS: self._clear()

    def _clear(self) -> None:
        """Columns of the last box that are none of the consumer's: zeros are added there."""
        kb, lane = self.kb, self.kb.special("laneid")
        for at in range(0, self.plan.warp_staging_bytes, 512):
            kb.st("shared", "b32", (self.staging + lane * 16).at(at), [0] * 4)

    def add(self, position: BlockPosition) -> None:
        """Adds the sums of the walker's block."""
        kb = self.kb
        with kb.if_(kb.elect()): self.drain()
        kb.emit("bar.warp.sync", -1)
        places = [self.place ^ at if at else self.place for at in range(0, 128, 32)]
        for j in range(len(self.sums) // 4):
            box, inside = divmod(32 * j, 128)
            for h in range(2):
                at = box * BOX_BYTES + 8 * 128 * h
                kb.st("shared", "f32", places[inside // 32].at(at),
                     self.sums[4 * j + 2 * h:4 * j + 2 * h + 2])
        kb.fence_proxy_async()
        kb.emit("bar.warp.sync", -1)
        with kb.if_(kb.elect()): self._reduce(position)

    def drain(self) -> None:
        """One lane: waits until the boxes may be written again, and gives their turn to the next CTA."""
        kb = self.kb
        kb.tma_wait(0, read=self.turns is None)
        if self.turns is None: return
        with kb.if_(self.turn != 0): self._give_turn()

    def _reduce(self, position: BlockPosition) -> None:
        """One lane."""
        kb, plan = self.kb, self.plan
        row, first = self._place(position)
        matrix = (self.head + position.head).to("s32")
        if self.turns is not None:
            self._take_turn(self.turns, position)
            kb.emit("fence.proxy.async.global")
        for box in range(plan.dq_boxes):
            place = self.to.tensor_map.at(coordinates=[first + DQ_COLUMNS * box, row, matrix])
            kb.emit("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group", place,
                   self.staging.at(box * BOX_BYTES))
        kb.tma_commit()


class DirectSums(QuerySums):
    """From registers, two elements of a row at a time. Turns are given at once: nothing is left to drain."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, to: Value, turns: Value | None,
                 blocks: RowBlocks, warp: Value,
                 head: Value) -> None:
        super().__init__(kb, plan, turns, blocks, warp, head)
        self.to = to

    def add(self, position: BlockPosition) -> None:
        """Adds the sums of the walker's block."""
        kb, d, lane = self.kb, self.plan.spec.forward.d, self.kb.special("laneid")
        row, first = (each.to("u32") for each in self._place(position))
        row, first = row + (lane >> 2), first + ((lane & 3) << 1)
        at = advance(kb, self.to, self.head + position.head, self.plan.spec.forward.s_q * d * 4)
        at = advance(kb, advance(kb, at, row, d * 4), first, 4)
        if self.turns is not None:
            with kb.if_(kb.elect()): self._take_turn(self.turns, position)
            kb.emit("bar.warp.sync", -1)
        whole = 2 * self.plan.dq_columns == d
        for h in range(2):
            # a branch around them all: ptxas would make one around each
            with kb.if_((row + 8 * h).to("s32") < self.blocks.s_q):
                for j in range(len(self.sums) // 4):
                    kb.emit("red.relaxed.gpu.global.add.v2.f32", at.at(32 * h * d + 32 * j),
                           self.sums[4 * j + 2 * h:4 * j + 2 * h + 2],
                           guard=None if whole else first + 8 * j < d)
        if self.turns is None: return
        kb.emit("fence.acq_rel.gpu")
        kb.emit("bar.warp.sync", -1)
        with kb.if_(kb.elect()): self._give_turn()

    def drain(self) -> None:
        """One lane."""
