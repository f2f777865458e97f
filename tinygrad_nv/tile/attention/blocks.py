"""Blocks of keys for a CTA's rows, and blocks of rows for its keys: band.py in registers.

Protocol: `KeyBlocks` is of the rows from `row` (s32) on, `RowBlocks` of the keys from `key` (s32) on, with
the blocks `first` … `end` - 1 of the other side: numbers where they are known, else s32. `documents` are
those of the CTA's tokens.

Forward kernels go through the keys downwards, in at most three runs:

    masked      from the last block down to the last plain one: the band ends in them, or the keys
    plain       all rows see all of their columns
    masked      down to `first`: the band begins in them

or ask `full`, an interval, of each block whether it `misses` some of it. Backward kernels go through the rows
upwards, once for each query head, and ask each block.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.band import Band, BlockRange, Interval
from tinygrad_nv.tile.attention.document_blocks import Documents
from tinygrad_nv.tile.attention.score import Extents, is_whole, max_s32, min_s32, registers
from tinygrad_nv.tile.attention.spec import AttentionSpec, multiple

Extent = Value | int


def _clip(kb: Kernel, seen: Interval, documents: Documents | None) -> Interval:
    """Returns the part of an interval that is the documents'."""
    if documents is None: return seen
    return Interval(max_s32(kb, documents.begin, seen.begin),
                    max_s32(kb, min_s32(kb, documents.end, seen.end), 0))


def count_blocks(kb: Kernel, first: Extent, end: Extent) -> Value:
    """How many blocks there are (s32)."""
    if isinstance(first, int): return kb.reg("s32", end) if isinstance(end, int) else end  # from block 0 on
    made = kb.reg("s32")
    kb.emit("max.s32", made, end - first, 0)
    return made


class KeyBlocks:
    """The blocks of keys that `block_m` rows see. No row sees a key from `key_end` on."""

    def __init__(self, kb: Kernel, spec: AttentionSpec, extents: Extents, row: Value, block_m: int,
                 block_n: int, documents: Documents | None = None) -> None:
        self.kb, self.band, self.whole_keys = kb, spec.band, is_whole(extents.s_kv, block_n)
        self.range = BlockRange.of_rows(registers(kb), spec.band, row, block_m, *extents.s32, block_n)
        seen = _clip(kb, self.range.visible(), documents)
        self.key_end: Extent = seen.end
        self.first: Extent = self.range.first_block(seen)
        self.end: Extent = self.range.end_block(seen)

    @property
    def needs_mask(self) -> bool:
        """Whether any block may need a mask."""
        return not (self.band.full and self.whole_keys)

    @property
    def always(self) -> bool:
        """Whether every CTA has blocks."""
        return isinstance(self.end, int) and isinstance(self.first, int)

    def any(self) -> AbstractContextManager[None]:
        """Emits the code inside for CTAs that have blocks alone."""
        if self.always: return nullcontext()
        return self.kb.if_(self.kb.reg("s32", self.end) > self.first)

    def count(self) -> Value:
        """How many blocks there are (s32)."""
        return count_blocks(self.kb, self.first, self.end)

    def runs(self) -> list[tuple[Extent, bool]]:
        """Returns the runs of blocks behind the last one, which is masked by itself where `needs_mask` says
        so: the block with which each run ends, and whether it is masked."""
        full = self.range.full()
        made: list[tuple[Extent, bool]] = [(self._from_first(self.range.first_plain(full)), False)]
        if self.band.last is not None: made.insert(0, (self._from_first(self.range.end_plain(full)), True))
        if self.band.first is not None: made.append((self.first, True))
        return made

    def _from_first(self, block: Extent) -> Extent:
        return block if isinstance(self.first, int) else max_s32(self.kb, block, self.first)


class RowBlocks:
    """The blocks of rows that see `keys` keys: `total` (s32) of all query heads. Rows beyond the last are
    hidden where the score is evaluated; else their sums are 0, and so is their p."""

    def __init__(self, kb: Kernel, spec: AttentionSpec, extents: Extents, key: Value, keys: int,
                 block_m: int, documents: Documents | None = None) -> None:
        self.kb, self.spec, self.key, self.keys, self.block_m = kb, spec, key, keys, block_m
        self.s_q, self.s_kv, self.start = extents.s32
        self.whole_rows, self.whole_keys = is_whole(self.s_q, block_m), is_whole(self.s_kv, keys)
        blocks = BlockRange.of_keys(registers(kb), spec.band, key, keys, *extents.s32, block_m)
        seen = _clip(kb, blocks.visible(), documents)
        self.first: Extent = blocks.first_block(seen)
        self.end: Extent = blocks.end_block(seen)
        self.total = count_blocks(kb, self.first, self.end) * spec.batch[2]
        self.beyond = None if self.whole_keys else key + keys > self.s_kv
        hides = multiple(spec.score) is None and not self.whole_rows
        # of all keys, so that the loop keeps one place of them: blocks are masked where some do not exist
        self.masked = replace(blocks, bottom=blocks.top, size=0 if spec.band.full else keys,
                              extent=self.s_q if hides else None)

    def full(self) -> Interval:
        """The rows that see all keys, or may be taken for such."""
        return self.masked.full()

    def partly(self, full: Interval, row: Value, rows: int) -> Value | None:
        """Whether some of `rows` rows from `row` (s32) on does not see all keys; None where all do."""
        made = full.misses(row, rows)
        return self.beyond if made is None else made if self.beyond is None else self.beyond | made

    def visible_keys(self) -> Interval:
        """The keys that some row sees, of those that there are."""
        band, start = self.spec.band, self.start
        seen = BlockRange(registers(self.kb), band, start, start + self.s_q, None).visible()
        return Interval(None if band.first is None else seen.begin, seen.end)

    def key_end(self) -> Extent | None:
        """The key after the last that there is, and that some row sees; None where it is beyond all tiles."""
        end = self.visible_keys().end
        return min_s32(self.kb, end, self.s_kv) if end is not None else None if self.whole_keys else self.s_kv

    def first_keys(self, row: Value) -> Extent:
        """The first block of keys that a block of rows from `row` (s32) on sees, if it sees any."""
        made = BlockRange.of_rows(registers(self.kb), Band(self.spec.band.first), row, self.block_m,
                                  self.block_m, self.s_kv, self.start, self.keys)
        return made.first_block(made.visible())


class BlockPosition:
    """Position of a walker: `block` (s32), `row` (s32, the block's first) and `head` (u32, of the group)."""

    def __init__(self, kb: Kernel, blocks: RowBlocks) -> None:
        self.kb, self.blocks = kb, blocks
        self.block = kb.reg("s32", blocks.first)
        self.head = kb.reg("u32", 0)

    @property
    def row(self) -> Value: return self.block * self.blocks.block_m

    @contextmanager
    def each(self) -> Iterator[None]:
        """Emits the code inside so that it is done for each block."""
        with self.kb.loop(0, self.blocks.total):
            yield
            self.advance()

    def advance(self) -> None:
        """The next block."""
        self.block += 1
        if self.blocks.spec.batch[2] == 1: return
        over = self.block >= self.blocks.end
        self.block.set(self.kb.select(over, self.blocks.first, self.block, "s32"))
        self.head += self.kb.select(over, 1, 0, "u32")
