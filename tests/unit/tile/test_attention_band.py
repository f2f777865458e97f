"""Blocks of keys that rows see, and blocks of rows that see keys, against masks written out."""
from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tile.band_case import EDGE, Tile, tiles, told
from tinygrad_nv.cpu.attention.score import C_INTEGERS, C
from tinygrad_nv.tile.attention.band import INTEGERS, Band, BlockRange


def blocks_where(hit: np.ndarray, block: int) -> set[int]:
    return {int(at) // block for at in hit.nonzero()[0]}


@settings(max_examples=1500, deadline=None)
@given(tiles())
def test_blocks_of_a_tile(tile: Tile):
    """Elements that are seen are exactly those; so are blocks, but for one more where nothing is seen."""
    mask = tile.mask
    begin, end, first, last, first_plain, end_plain = told(tile.range_of())
    hit = np.logical_or.reduce(mask)
    assert set(range(begin, end)) == set(hit.nonzero()[0])
    some = blocks_where(hit, tile.block)
    assert set(range(first, last)) == some or (not some and last - first <= 1)
    whole = range(mask.shape[1] // tile.block)
    plain = {at for at in whole if mask[:, at * tile.block:(at + 1) * tile.block].all()}
    assert set(range(first_plain, end_plain)) == plain


@settings(max_examples=300, deadline=None)
@given(tiles(), st.data())
def test_what_needs_a_mask(tile: Tile, data: st.DataObject):
    """Anything that all of a tile sees, from anywhere on; and each element of a tile by itself."""
    mask = tile.mask
    across = mask.shape[1]
    first, count = data.draw(st.integers(0, across)), data.draw(st.integers(1, 20))
    missed = tile.range_of().full().misses(first, count)
    assert missed == (first + count > across or not mask[:, first:first + count].all())
    for i, row in enumerate(mask):
        one = Tile(tile.band, tile.s_q, tile.s_kv, tile.start, tile.first + i, 1, 1, tile.of_keys)
        seen = one.range_of().full()
        assert [bool(seen.has(at)) for at in range(across)] == row.tolist()


@settings(max_examples=100, deadline=None)
@given(tiles())
def test_arrays_and_expressions_of_c(tile: Tile):
    """All tiles of a side at once, and the text of one, say what numbers do."""
    most = tile.s_kv if tile.of_keys else tile.s_q
    firsts = np.arange(0, most, tile.count)
    whole = [np.broadcast_to(each, firsts.shape) for each in told(tile.range_of(first=firsts))]
    for at, first in enumerate(firsts):
        assert [each[at] for each in whole] == told(tile.range_of(first=int(first)))
    names = {"first": tile.first, "s_q": tile.s_q, "s_kv": tile.s_kv, "start": tile.start,
             "smaller": min, "larger": max}
    made = told(tile.range_of(C_INTEGERS, *map(C, ("first", "s_q", "s_kv", "start"))))
    assert [eval(str(each).replace("/", "//"), names) for each in made] == told(tile.range_of())


@given(EDGE, EDGE)
def test_transposed(first: int | None, last: int | None):
    band = Band(first, last)
    assert band.transpose().transpose() == band
    assert band.transpose().empty == band.empty
    rows = BlockRange.of_rows(INTEGERS, band.transpose(), 8, 8, 40, 50, 0, 4)
    assert told(rows) == told(BlockRange.of_keys(INTEGERS, band, 8, 8, 50, 40, 0, 4))
