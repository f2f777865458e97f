"""Where elements of a tile lie in shared memory: rows of 32, 64 or 128 bytes with the swizzle of that
width.

Protocol: a tile of `rows` × `row_bytes` is stored as columns of `span` bytes (at most 128), each a block of
`rows` rows one under the other; then bits 4 to 6 of the offset are XORed with bits 7 to 9, as TMA and wgmma
have it. Eight rows at the same 16 bytes of a column then lie in different banks. The tile begins at a
multiple of 1024.
"""
from __future__ import annotations

from dataclasses import dataclass

MASKS = {128: 7, 64: 3, 32: 1}


@dataclass(frozen=True)
class SharedTile:
    """A tile's extents; offsets are bytes from its beginning."""
    rows: int
    row_bytes: int

    @property
    def span(self) -> int: return min(self.row_bytes, 128)

    @property
    def nbytes(self) -> int: return self.rows * self.row_bytes

    def offset(self, row: int, byte: int) -> int:
        """The place of a byte of a row."""
        plain = byte // self.span * self.rows * self.span + row * self.span + byte % self.span
        return plain ^ (plain >> 7 & MASKS[self.span]) << 4
