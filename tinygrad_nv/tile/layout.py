"""Layout of a tile in shared memory: rows of 32, 64 or 128 bytes with the swizzle of that width, or of 16
bytes without one.

Protocol: a tile of `rows` × `row_bytes` is stored as columns of `span` bytes (the widest of 128, 64, 32 and
16 that divides a row), each a block of `rows` rows one under the other; then some bits of the offset within a
row are XORed with some of the row's number. Which ones depends on how the tile is `read`:

    matrices  ldmatrix, TMA, wgmma: bits 4 to 6 with 7 to 9. Eight rows at the same 16 bytes of a column then
              lie in different banks
    words     4 bytes of each of four rows, from eight columns: bits 5 and 6 with the row's lowest two
    bytes     one byte of every fourth row, from eight columns: bits 4 to 6 with the row's number / 4, in rows
              below 128 bytes bits 5 and 6, which are of the row's own number

The tile begins at a multiple of 1024. The swizzle is linear over XOR: for `x` and `y` without common bits
`swizzled(x + y) = swizzled(x) ^ swizzled(y)`, so that of many places of a thread all but a few are
constants away from others.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MASKS = {128: 7, 64: 3, 32: 1, 16: 0}
Read = Literal["matrices", "words", "bytes"]


@dataclass(frozen=True)
class SharedTile:
    """A tile's extents; offsets are bytes from its beginning."""
    rows: int
    row_bytes: int
    read: Read = "matrices"

    @property
    def span(self) -> int: return next(span for span in MASKS if self.row_bytes % span == 0)

    @property
    def nbytes(self) -> int: return self.rows * self.row_bytes

    @property
    def bits(self) -> tuple[int, int, int]:
        """(from, mask, to): bits `from` and on under the mask are XORed into bits `to` and on."""
        if self.read == "words": return 7, MASKS[self.span] >> 1, 5
        if self.read == "bytes":
            start = self.span.bit_length() + 1
            return (start, 7, 4) if self.span == 128 else (start, 3, 5)
        return 7, MASKS[self.span], 4

    @property
    def window(self) -> int:
        """Bytes within which the swizzle moves."""
        return 128 if self.read == "bytes" else self.span

    def plain(self, row: int, byte: int) -> int:
        """The place of a byte of a row before the swizzle."""
        return byte // self.span * self.rows * self.span + row * self.span + byte % self.span

    def swizzle(self, plain: int) -> int:
        """The swizzle of an offset."""
        start, mask, to = self.bits
        return plain ^ (plain >> start & mask) << to

    def offset(self, row: int, byte: int) -> int:
        """The place of a byte of a row."""
        return self.swizzle(self.plain(row, byte))
