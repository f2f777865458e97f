"""How a CTA brings rows of q, keys or values to shared memory.

Protocol: a `RowCopy` moves tiles of `tile.rows` rows of one matrix. A thread copies 16 bytes a pass, in the
order of shared memory, so that its places of all passes are constants away from the first, in global memory
too. Rows at and beyond an edge, and elements between the head's and the tile's width, become zeros: memory
there is not read. Copies are cp.async of what rows are aligned to, 4 to 16 bytes.

A `ColumnPipeline` brings blocks of keys and values to a ring of stages, from the last block to the first:
`fill` starts those of all stages but one, `start_copies` the next block, once the stage it goes to is read no
more, and `turn` moves on by one stage.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import CHUNK, MOST_OFFSET, Passes, Places, swizzle_plain

LEAST_BYTES = 4  # of a cp.async


@dataclass
class RowCopy(Passes):
    """Copies rows of `rows`, of which `first` (u64) is where the first tile begins, `d` elements of each, to
    `tile`, that lies `start` bytes after a stage's beginning."""
    kb: Kernel
    rows: Rows
    first: Value
    d: int
    tile: SharedTile
    start: int = 0
    outside: dict[int, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kb, tile, self.size = self.kb, self.tile, self.rows.dtype.itemsize
        self.threads, a_row, thread = kb.threads[0], tile.span // CHUNK, kb.tid.x
        self.places = Places(kb, tile, swizzle_plain(thread * CHUNK, tile))
        self.byte, self.row = thread % a_row * CHUNK, thread // a_row
        if self.threads > a_row * tile.rows:
            self.byte, self.row = self.byte + self.row // tile.rows * tile.span, self.row % tile.rows
        self.source = self.first + self.row.to("u64") * (self.rows.row * self.size) + self.byte.to("u64")
        self.width = min(self.rows.alignment_bytes, self.d * self.size & -(self.d * self.size))

    def rows_left(self, rows: Value) -> Value:
        """Returns how many of the `rows` (s32) of a tile are left from this thread's own on."""
        return rows - self.row.to("s32")

    def to(self, stage: Value, when: Value | None = None, left: Value | None = None) -> None:
        """Copies the tile to the stage at a shared address (u32), where the predicate holds. `rows_left` is
        `rows_left()` of the rows there are; None where there are all."""
        kb = self.kb
        self.places.at_stage(stage)
        inside = {row: left <= row for row, _ in map(self.where, range(self.passes))} \
            if left is not None else {}
        for i in range(self.passes):
            fewer, guard, (row, column) = self.tile.nbytes // CHUNK - i * self.threads, when, self.where(i)
            if fewer < self.threads:
                guard = kb.tid.x < fewer
                if when is not None: guard = guard & when
            for at in range(0, CHUNK, self.width):
                beyond = self._beyond(column + at)
                if (edge := inside.get(row)) is not None: beyond = edge if beyond is None else beyond | edge
                kb.emit(f"cp.async.{'cg' if self.width == CHUNK else 'ca'}.shared.global.L2::128B",
                       self.places(i * self.threads * CHUNK, self.start + at),
                       self._place(row, column + at), self.width, *([] if beyond is None else [beyond]),
                       guard=guard)

    def _place(self, row: int, byte: int) -> MemoryOperand:
        nbytes = row * self.rows.row * self.size + byte
        return self.source.at(nbytes) if nbytes <= MOST_OFFSET else (self.source + nbytes).at()

    def _beyond(self, column: int) -> Value | None:
        """Whether `column` bytes after this thread's first are beyond the head; None where they cannot be."""
        nbytes = self.d * self.size
        if self.tile.row_bytes == nbytes: return None
        if column not in self.outside: self.outside[column] = self.byte + column >= nbytes
        return self.outside[column]

    def back(self) -> None:
        """The tile before in memory comes next."""
        self.source -= self.tile.rows * self.rows.row * self.size


@dataclass
class ColumnPipeline:
    """Stages of `stage_bytes` each from a shared address (u32) on, and what brings a block's tiles to one."""
    kb: Kernel
    copies: Sequence[RowCopy]
    start: Value
    stage_bytes: int
    depth: int

    @property
    def ahead(self) -> int:
        """Blocks on their way while one is read."""
        return self.depth - 1

    def fill(self, blocks: KeyBlocks, count: Value, base: Value) -> None:
        """Starts the copies of the first of `count` blocks; `base` (s32) is the first column of the first."""
        whole = blocks.band.last is None and blocks.whole_keys
        for stage in range(self.ahead):
            left = None if stage or whole else blocks.key_end - base
            self._bring(self.start + stage * self.stage_bytes, count > stage, left)

    def begin(self) -> None:
        """Ahead of the loop: which stage is read, and which written."""
        self.reading = self.kb.reg("u32", name="reading").set(self.start)
        self.writing = self.kb.reg("u32", name="writing").set(self.start + self.ahead * self.stage_bytes)
        self.end = self.start + self.depth * self.stage_bytes

    def start_copies(self, when: Value) -> None:
        """The next block, where the predicate holds."""
        self._bring(self.writing, when, None)

    def turn(self) -> None:
        """The stage that was read is written next."""
        self.writing.set(self.reading)
        self.reading += self.stage_bytes
        self.reading.set(self.kb.select(self.reading == self.end, self.start, self.reading))

    def _bring(self, stage: Value, when: Value, left: Value | None) -> None:
        for copy in self.copies:
            copy.to(stage, when, None if left is None else copy.rows_left(left))
            copy.back()
        self.kb.cp_async_commit()
