"""Work tiles that are drawn from a counter: rows of the grid, and when the last one ends."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.ptx.timing.drawn import DrawnTiles, lengths, makespan, row_of

ROW, CLUSTERS, ROWS, BEGUN = 512, 132, 4, 200


def length(tile: int) -> int:
    """Steps of a causal attention's tile: the longest comes first, four heads in a row."""
    return 60 + 56 * (ROW - 1 - tile % ROW) // 4


def few_of_them() -> DrawnTiles:
    """Tiles that six of 132 warps drew: each had a first tile, which no counter gave it."""
    known = [(number, length(number + CLUSTERS)) for number in range(16, ROWS * ROW - CLUSTERS, 17)]
    drawing = [(cluster, BEGUN + length(cluster), 60_000) for cluster in range(0, CLUSTERS, 23)]
    return DrawnTiles(np.array(known), ROWS * ROW - CLUSTERS + 7, drawing)


def test_the_row_is_the_one_after_which_lengths_repeat_best():
    """Shorter ones fit as well within what a row may vary."""
    tiles = few_of_them()
    assert row_of(tiles.known) == ROW
    assert row_of(np.array([(n, 10 + n % 7 * (-1) ** n) for n in range(0, 90, 3)])) == 0


def test_lengths_jump_between_two_rows():
    """Nothing lies between the shortest tile of a row and the longest of the next."""
    tiles = few_of_them()
    numbers = np.arange(ROWS * ROW - CLUSTERS)
    true = np.array([length(number + CLUSTERS) for number in numbers])
    for begin, wrong in ((-CLUSTERS, 0.0), (None, 0.02)):      # where a row begins is known, or within a few
        off = np.abs(lengths(tiles.known, numbers, ROW, begin) - true)
        assert (off > 0.05 * true.max()).mean() <= wrong
        assert not ((off > 0.1 * true.max()) & (off < 0.9 * true.max())).any()


def test_the_last_tile_ends_when_all_tiles_are_dealt():
    """Longest first, so that all warps end at about the same time; the beginning of a warp counts once."""
    whole = sum(map(length, range(ROWS * ROW)))
    assert makespan(few_of_them(), CLUSTERS) == pytest.approx(whole / CLUSTERS + BEGUN, rel=0.02)
