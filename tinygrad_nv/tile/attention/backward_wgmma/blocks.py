"""Blocks of rows that see a CTA's keys, and those of them that need a mask.

Protocol: `BackwardBlocks` is of the keys from `column` (s32) on. Its query heads are walked one after the
other, each with the blocks of rows `first` … `end` - 1, upwards; all walkers (producers and consumers) use
`BlockPosition`. A row r sees the keys r + start + band.first … r + start + band.last, so that a key c is seen
by the rows c − start − band.last … c − start − band.first.

Extents are numbers or registers (s32).
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.backward_wgmma.plan import BackwardWgmmaPlan
from tinygrad_nv.tile.attention.document_blocks import Documents
from tinygrad_nv.tile.attention.score import Extents, max_s32, min_s32

Extent = Value | int
FAR = 1 << 30  # beyond all places


class BackwardBlocks:
    """The blocks of rows of a CTA."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, column: Value, extents: Extents,
                 documents: Documents | None = None) -> None:
        self.kb, self.plan, self.column = kb, plan, column
        self.s_q, self.s_kv, self.start = (each.to("s32") if isinstance(each, Value) else each
                                           for each in (extents.s_q, extents.s_kv, extents.start))
        band, m, n = plan.spec.forward.band, plan.schedule.block_m, plan.schedule.block_n
        zero = kb.reg("s32", 0)
        self.first: Extent = 0
        if band.last is not None: self.first = max_s32(kb, column - self.start - band.last, 0) // m
        last_row: Extent = self.s_q
        if band.first is not None:
            inside = min_s32(kb, column + n, self.s_kv) - self.start - band.first
            last_row = max_s32(kb, min_s32(kb, inside, self.s_q), 0)
        if documents is not None:
            self.first = max_s32(kb, max_s32(kb, documents.begin, 0) // m, self.first)
            last_row = min_s32(kb, documents.end, last_row)
        end = zero + (last_row + (m - 1)) // m
        self.end = end
        self.count = max_s32(kb, end - self.first, 0)
        self.total = self.count * plan.spec.forward.batch[2]

    @property
    def needs_mask(self) -> bool:
        """Whether any block may need a mask."""
        return not self.plan.spec.forward.band.full or self.plan.has_ragged_end or self.plan.hides_rows

    def partly(self, row: Value, rows: int) -> Value:
        """Whether some of `rows` rows from `row` (s32) on does not see all of the keys."""
        band, n, at = self.plan.spec.forward.band, self.plan.schedule.block_n, row + self.start
        made: list[Value] = []
        if self.plan.has_ragged_end: made.append(self.column + n > self.s_kv)
        if band.last is not None: made.append(at < self.column + (n - 1 - band.last))
        if band.first is not None: made.append(at > self.column - (band.first + rows - 1))
        if self.plan.hides_rows: made.append(row + rows > self.s_q)
        found = made[0]
        for each in made[1:]: found = found | each
        return found

    def first_keys(self, row: Value) -> Value | int:
        """The first block of keys that rows from `row` (s32) on see, a block of them, if they see any."""
        first = self.plan.spec.forward.band.first
        if first is None: return 0
        return max_s32(self.kb, row + self.start + first, 0) // self.plan.schedule.block_n

    def unseen(self) -> Value | None:
        """Whether no row sees some of the keys; None where that cannot be."""
        band, n = self.plan.spec.forward.band, self.plan.schedule.block_n
        made: list[Value] = []
        if band.last is not None: made.append(self.column + (n - band.last) > self._after())
        if band.first is not None: made.append(self.column < self._before(band.first))
        if not made: return None
        return made[0] if len(made) == 1 else made[0] | made[1]

    def is_seen(self, key: Value) -> Value:
        """Whether some row sees the key (s32)."""
        band = self.plan.spec.forward.band
        made: list[Value] = []
        if band.last is not None: made.append(key - band.last < self._after())
        if band.first is not None: made.append(key >= self._before(band.first))
        return made[0] if len(made) == 1 else made[0] & made[1]

    def _after(self) -> Value:
        """The place after that of the last row."""
        return self.kb.reg("s32", self.s_q) + self.start

    def _before(self, first: int) -> Value:
        """The first key that row 0 sees."""
        return self.kb.reg("s32", self.start) + first

    def rows_of(self, key: Value) -> tuple[Value | None, Value | None]:
        """The first row that sees a key, and the last; None without a bound."""
        kb, band = self.kb, self.plan.spec.forward.band
        low = None if band.last is None else key - self.start - band.last
        high = None if band.first is None else key - self.start - band.first
        if self.plan.has_ragged_end:
            low = kb.select(key < self.s_kv, -FAR if low is None else low, FAR, "s32")
        if self.plan.hides_rows:
            last = kb.reg("s32", self.s_q) - 1
            high = last if high is None else min_s32(kb, high, last)
        return low, high


class BlockPosition:
    """Position of a walker: `block` (s32), `row` (s32, the block's first) and `head` (u32, of the group)."""

    def __init__(self, kb: Kernel, blocks: BackwardBlocks) -> None:
        self.kb, self.blocks = kb, blocks
        self.block = kb.reg("s32", blocks.first)
        self.head = kb.reg("u32", 0)

    @property
    def row(self) -> Value: return self.block * self.blocks.plan.schedule.block_m

    @contextmanager
    def each(self) -> Iterator[None]:
        """Emits the code inside so that it is done for each block."""
        with self.kb.loop(0, self.blocks.total):
            yield
            self.advance()

    def advance(self) -> None:
        """The next block."""
        self.block += 1
        if self.blocks.plan.spec.forward.batch[2] == 1: return
        over = self.block >= self.blocks.end
        self.block.set(self.kb.select(over, self.blocks.first, self.block, "s32"))
        self.head += self.kb.select(over, 1, 0, "u32")
