"""The blocks of rows that see a block of keys, and how they come to shared memory.

Protocol: `RowBlocks` says which blocks of `block_m` rows have a row that sees one of the CTA's keys, of each
query head of its key head: the same of each. A `RowBlockPosition` goes through them, head after head, and
tells by how much addresses advance. A `RowPipeline` brings them: tiles of q and of the gradient by cp.async,
and for each row −l · log2 e and −delta, by way of registers, since they change on the way:

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
from tinygrad_nv.tile.attention.document_blocks import Documents
from tinygrad_nv.tile.attention.mma.copy import RowCopy
from tinygrad_nv.tile.attention.score import LOG2E, Extents, max_s32, min_s32, to_signed
from tinygrad_nv.tile.attention.spec import AttentionSpec


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
class RowBlocks:
    """Blocks of the rows that see keys from `first` (u32) on, `keys` of them. `low` (s32) is the first row of
    the first block, `end` (s32) where the last one ends, `count` (s32) how many there are, of all query
    heads. With `hide_rows` rows beyond s_q do not see keys, else they may, with p = 0. `documents` are those
    of the keys."""
    kb: Kernel
    spec: AttentionSpec
    extents: Extents
    first: Value
    keys: int
    block_m: int
    hide_rows: bool = False
    documents: Documents | None = None

    def __post_init__(self) -> None:
        kb, band, first = self.kb, self.spec.band, self.first.to("s32")
        s_q, s_kv, start = (to_signed(kb, each) for each in (self.extents.s_q, self.extents.s_kv,
                                                         self.extents.start))
        last = min_s32(kb, first + self.keys, s_kv)
        self.low, end, self.key_end = kb.reg("s32", 0), s_q, s_kv
        self.full_low: Value | None = None
        self.full_end: Value | None = None
        if band.last is not None:
            self.low = max_s32(kb, first - start - band.last, 0) // self.block_m * self.block_m
            self.full_low = last - 1 - start - band.last
            self.key_end = min_s32(kb, s_kv, s_q + start + band.last)
        if band.first is not None:
            end = min_s32(kb, s_q, last - start - band.first)
            self.full_end = first - start - band.first + 1
        if self.documents is not None:
            begin = max_s32(kb, self.documents.begin, 0) // self.block_m * self.block_m
            self.low = max_s32(kb, self.low, begin)
            end = min_s32(kb, end, self.documents.end)
        blocks = (max_s32(kb, end - self.low, 0) + self.block_m - 1) // self.block_m
        self.end = self.low + blocks * self.block_m
        self.count = blocks * self.spec.batch[2]
        self.beyond = None if self.whole_keys else first + self.keys > s_kv

    @property
    def whole_keys(self) -> bool:
        """Whether every block of keys is full."""
        s_kv = self.extents.s_kv
        return isinstance(s_kv, int) and s_kv % self.keys == 0

    @property
    def whole_rows(self) -> bool:
        """Whether every block of rows is full."""
        s_q = self.extents.s_q
        return isinstance(s_q, int) and s_q % self.block_m == 0

    def partly(self, base: Value) -> Value | None:
        """Whether some row of the block from `base` (s32) on does not see all keys; None where all do."""
        made = self.beyond
        if self.full_low is not None:
            early = base < self.full_low
            made = early if made is None else made | early
        if self.full_end is not None:
            late = base + self.block_m > self.full_end
            made = late if made is None else made | late
        if self.hide_rows and not self.whole_rows:
            outside = base + self.block_m > to_signed(self.kb, self.extents.s_q)
            made = outside if made is None else made | outside
        return made


@dataclass
class RowBlockPosition:
    """A place in the blocks of rows, head after head: `row` (s32) is the block's first, `query` (u32) the
    head."""
    blocks: RowBlocks

    def __post_init__(self) -> None:
        self.kb, self.group = self.blocks.kb, self.blocks.spec.batch[2]
        self.row, self.query = self.kb.reg("s32", self.blocks.low), self.kb.reg("u32", 0)
        self.addresses: list[tuple[Value, int, int]] = []
        if self.group > 1: self.span = self.blocks.low - self.blocks.end

    def follow(self, address: Value, row_bytes: int, head_bytes: int) -> None:
        """An address (u64) that moves along: of row `low` of the first head."""
        self.addresses.append((address, row_bytes, head_bytes))

    def advance(self) -> None:
        """The next block."""
        kb, step = self.kb, self.blocks.block_m
        self.row += step
        for address, row_bytes, _ in self.addresses: address += step * row_bytes
        if self.group == 1: return
        with kb.if_(self.row >= self.blocks.end):  # once for a head: a branch, not a choice for each address
            self.row.set(self.blocks.low)
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
        kb, blocks = self.kb, self.position.blocks
        return None if blocks.whole_rows else to_signed(kb, blocks.extents.s_q) - self.position.row

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
