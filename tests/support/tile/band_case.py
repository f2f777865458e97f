"""Tiles of one side of an attention's mask, drawn, and what a mask written out says of the other side.

Protocol: a `Tile` is of rows, or with `of_keys` of keys. `mask` is [tile, other side], `found` what it says:
the elements that some of the tile sees, those that all of it does, and of whole blocks the same. `told` is
what a `BlockRange` says, in the order of `NAMES`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tinygrad_nv.tile.attention.band import INTEGERS, Arithmetic, Band, BlockRange

NAMES = ("seen begin", "seen end", "first block", "end block", "first plain", "end plain")
EDGE = st.one_of(st.none(), st.integers(-40, 40))


@dataclass(frozen=True)
class Tile:
    """`count` elements from `first` on, of those that there are, and blocks of `block`."""
    band: Band
    s_q: int
    s_kv: int
    start: int
    first: int
    count: int
    block: int
    of_keys: bool

    def range_of(self, numbers: Arithmetic = INTEGERS, first: Any = None, s_q: Any = None, s_kv: Any = None,
                 start: Any = None) -> BlockRange:
        """Its blocks, with what is given in place of its own numbers."""
        given = (self.first if first is None else first, self.count, self.s_q if s_q is None else s_q,
                 self.s_kv if s_kv is None else s_kv, self.start if start is None else start)
        make = BlockRange.of_keys if self.of_keys else BlockRange.of_rows
        return make(numbers, self.band, *given, self.block)

    @property
    def mask(self) -> np.ndarray:
        """Whether a row sees a key, of the tile's elements by all of the other side."""
        place, key = np.arange(self.s_q)[:, None] + self.start, np.arange(self.s_kv)
        made = np.ones((self.s_q, self.s_kv), bool)
        if self.band.first is not None: made &= key >= place + self.band.first
        if self.band.last is not None: made &= key <= place + self.band.last
        return (made.T if self.of_keys else made)[self.first:self.first + self.count]


def told(made: BlockRange) -> list[Any]:
    """What a range says."""
    seen, full = made.visible(), made.full()
    return [seen.begin, seen.end, made.first_block(seen), made.end_block(seen), made.first_plain(full),
            made.end_plain(full)]


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    """Windows, causal and other bands, empty ones too, at the beginning and far on."""
    s_q, s_kv, of_keys = draw(st.integers(1, 50)), draw(st.integers(1, 70)), draw(st.booleans())
    count = draw(st.integers(1, 24))
    first = draw(st.integers(0, ((s_kv if of_keys else s_q) - 1) // count)) * count
    band = draw(st.sampled_from([Band(), Band(None, 0), Band(-7, 0), Band(draw(EDGE), draw(EDGE))]))
    start = draw(st.one_of(st.just(0), st.just(max(s_kv - s_q, 0)), st.integers(0, 60)))
    return Tile(band, s_q, s_kv, start, first, count, draw(st.integers(1, 16)), of_keys)
