"""How the blocks of rows that see a block of keys come to shared memory.

Protocol: a `RowBlockPosition` goes through the blocks (blocks.py), head after head, and tells by how much
addresses advance. A `RowPipeline` brings them: tiles of q and of the gradient by cp.async, and for each row
−l · log2 e and −delta, by way of registers, since they change on the way:

    ring.start_copies(stage, when)    starts the copies of the next block
    …                                 work with many registers
    ring.ask(when)                    starts the loads of the block's l and delta
    …                                 work that does not need them
    ring.finish(stage)                these to the stage, before the barrier after which it is read

Rows beyond s_q, and rows with l = −inf (that see nothing), have −inf in the place of −l · log2 e, which makes
all their p 0.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.blocks import RowBlocks
from tinygrad_nv.tile.attention.mma.copy import RowCopy
from tinygrad_nv.tile.attention.score import LOG2E


def exponent(kb: Kernel, log: Value) -> Value:
    """−log₂e · l, or −∞ for l = −∞. Exponents are differences of numbers as large as l, wrong by up to 2⁻²³
    of it: beyond 2²⁵ they are made less by twice that, so that no p is above 2⁸."""
    size, hidden = kb.reg("f32"), kb.reg("pred")
    minus = log * -LOG2E
    kb.emit("abs.f32", size, minus)
    kb.emit("fma.rn.f32", size, size, 2.0**-22, -8.0)
    kb.emit("max.f32", size, size, 0.0)
    kb.emit("setp.eq.f32", hidden, log, -math.inf)
    return kb.select(hidden, -math.inf, minus - size)


@dataclass
class RowBlockPosition:
    """A place in the blocks of rows, head after head: `row` (s32) is the block's first, `query` (u32) the
    head. A head's blocks are the rows `low` … `end` − 1."""
    blocks: RowBlocks

    def __post_init__(self) -> None:
        kb, blocks = self.blocks.kb, self.blocks
        self.kb, self.group = kb, blocks.spec.batch[2]
        self.low = kb.reg("s32", blocks.first * blocks.block_m)
        self.row, self.query = kb.reg("s32", self.low), kb.reg("u32", 0)
        self.addresses: list[tuple[Value, int, int]] = []
        if self.group == 1: return
        self.end = blocks.end * blocks.block_m
        self.span = self.low - self.end

    def follow(self, address: Value, row_bytes: int, head_bytes: int) -> None:
        """An address (u64) that moves along: of row `low` of the first head."""
        self.addresses.append((address, row_bytes, head_bytes))

    def advance(self) -> None:
        """The next block."""
        kb, step = self.kb, self.blocks.block_m
        self.row += step
        for address, row_bytes, _ in self.addresses: address += step * row_bytes
        if self.group == 1: return
        with kb.if_(self.row >= self.end):  # once for a head: a branch, not a choice for each address
            self.row.set(self.low)
            self.query += 1
            for address, row_bytes, head_bytes in self.addresses:
                back = kb.reg("s64")
                kb.emit("mad.wide.s32", back, self.span, row_bytes, head_bytes)
                address += back.to("u64")


@dataclass
class RowPipeline:
    """Brings blocks of rows. `q` and `grad` copy from row `low` of the first head on; that row's l and delta
    lie `at` (u64) bytes after `log` and `delta`, the kernel's pointers: one register of both. In a stage they
    are `place` bytes after its beginning."""
    position: RowBlockPosition
    q: RowCopy
    grad: RowCopy
    log: Value
    delta: Value
    at: Value
    place: int
    pending: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks, spec = self.position.blocks, self.position.blocks.spec
        self.kb, self.block_m = blocks.kb, blocks.block_m
        for copy in (self.q, self.grad):
            size = copy.rows.dtype.itemsize
            self.position.follow(copy.source, copy.rows.row * size, copy.rows.batch[2] * size)
        self.at = self.at + self.kb.tid.x.to("u64") * 4
        self.position.follow(self.at, 4, spec.s_q * 4)

    def start_copies(self, stage: Value, when: Value) -> None:
        """Starts the copies of the next block to a stage (u32), where the predicate holds."""
        left = self._rows_left()
        for copy in (self.q, self.grad): copy.to(stage, when, None if left is None else copy.rows_left(left))
        self.kb.cp_async_commit()

    def _rows_left(self) -> Value | None:
        """Rows that there are from the block's first on, None where there are as many as it has."""
        blocks = self.position.blocks
        return None if blocks.whole_rows else blocks.s_q - self.position.row

    def ask(self, when: Value) -> None:
        """Starts the loads of l and delta, where the predicate holds, and goes on to the next block."""
        kb, left = self.kb, self._rows_left()
        mine = (kb.tid.x < self.block_m) & when
        if left is not None: mine = mine & (kb.tid.x.to("s32") < left)
        self.pending = [kb.reg("f32", -math.inf), kb.reg("f32", 0.0)]
        for made, address in zip(self.pending, (self.log, self.delta), strict=True):
            kb.emit("ld.global.f32", made, (address + self.at).at(), guard=mine)
        self.position.advance()

    def finish(self, stage: Value) -> None:
        """Writes −l · log2 e and −delta."""
        kb, (log, delta) = self.kb, self.pending
        at = stage + kb.tid.x * 4
        for value, start in ((exponent(kb, log), self.place), (-delta, self.place + 4 * self.block_m)):
            kb.emit("st.shared.f32", at.at(start), value, guard=kb.tid.x < self.block_m)
