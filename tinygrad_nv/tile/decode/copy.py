"""Pages to shared memory: how warps of a decode kernel bring keys or values by cp.async.

Protocol: the pages of a split are in shared memory (`Table`). A `PagedTileCopy` moves a tile of keys, 16
bytes a thread and pass, in the order of shared memory, so that its places are constants away from the first.
Passes whose keys lie in the same page for sure share one look-up: of pages with 16 tokens or more and tiles
of 16 keys there is one for the whole tile.

Keys of a contiguous cache lie `token` apart, which needs no look-up.

Keys outside low … high − 1 are not read: their places become zeros.

No copy has a cache policy, though L2 could drop first what is read once: of cp.async with a policy and a
shared address in a register and a uniform one, ptxas 12.9 and 13.0 make LDGSTS with operands of neither,
which an H100 answers with "illegal instruction".
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.spec import Pages
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import CHUNK, Places, swizzle_plain


@dataclass
class Bounds:
    """Keys (s32): `begin` is the split's first, `low` … `high` − 1 of them are read."""
    begin: Value
    low: Value
    high: Value


@dataclass
class PagedTileCopy:
    """Copies tiles of `tile.rows` keys, `width` bytes of each, from `pointer` (u64), the key head's first
    element of page 0. `thread` (u32) is the thread's number among `threads`; `table` the shared address (u32)
    of the split's pages, None for a contiguous cache, where `pointer` is the request's first element; `start`
    is where the tile lies in a stage."""
    kb: Kernel
    pages: Pages
    page_size: int
    pointer: Value
    tile: SharedTile
    width: int
    thread: Value
    threads: int
    table: Value | None
    start: int

    def __post_init__(self) -> None:
        kb, tile = self.kb, self.tile
        self.places = Places(kb, tile, swizzle_plain(self.thread * CHUNK, tile))
        across = tile.span // CHUNK
        self.at_once = min(tile.rows, self.threads // across)  # rows of a pass
        byte, row = self.thread % across * CHUNK, self.thread // across
        self.columns = max(1, self.threads // across // tile.rows)  # columns of a pass
        if self.columns > 1: byte, row = byte + row // tile.rows * tile.span, row % tile.rows
        self.row, self.byte = row.to("s32"), byte
        self.source = self.pointer + byte.to("u64")
        # ahead of branches, which would keep to themselves what they compute
        self.places.prepare([self._plain(row, column) for row, column in self._passes()])

    def _passes(self) -> list[tuple[int, int]]:
        """Rows and columns in bytes of a thread's copies, from its first on."""
        return [(row, column) for row in range(0, self.tile.rows, self.at_once)
                for column in range(0, self.tile.row_bytes, self.columns * self.tile.span)]

    def _plain(self, row: int, column: int) -> int: return column * self.tile.rows + row * self.tile.span

    def copy(self, stage: Value, first: Value, bounds: Bounds) -> None:
        """The tile of keys from `first` (s32) on, to the stage at a shared address (u32)."""
        kb = self.kb
        self.places.at_stage(stage)
        key = first + self.row
        run = self.tile.rows if self.table is None else max(self.page_size, self.at_once)
        inside = key - bounds.low
        extent = bounds.high - bounds.low
        for row, column in self._passes():
            if column == 0:
                if row % run == 0: source = self._look_up(key + row if row else key, bounds)
                outside = kb.reg("pred")
                kb.emit("setp.ge.u32", outside, (inside + row if row else inside).to("u32"), extent.to("u32"))
            kb.emit("cp.async.cg.shared.global.L2::128B",
                   self.places(self._plain(row, column), self.start),
                   source.at(row % run * self.pages.token * self.pages.dtype.itemsize + column), CHUNK,
                   outside, guard=self._guard(column))

    def _look_up(self, key: Value, bounds: Bounds) -> Value:
        """Returns the address at which the thread's bytes of a key lie: u64."""
        kb, size = self.kb, self.pages.dtype.itemsize
        if self.table is None:
            made = kb.reg("u64")
            kb.emit("mad.wide.u32", made, key.to("u32"), self.pages.token * size, self.source)
            return made
        slot = (key - bounds.begin).to("u32") // self.page_size
        page = kb.ld("shared", "u32", (self.table + slot * 4).at())[0]
        made = kb.reg("u64")
        kb.emit("mad.wide.u32", made, page, self.pages.page * size, self.source)
        within = key.to("u32") & (self.page_size - 1)
        kb.emit("mad.wide.u32", made, within, self.pages.token * size, made)
        return made

    def _guard(self, column: int) -> Value | None:
        """Whether a thread has bytes of a row, from `column` on; None where all have."""
        whole = column + self.columns * self.tile.span <= self.width
        return None if whole else self.byte < self.width - column
