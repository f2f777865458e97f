"""Gathers and scatters in C: rows that indices choose are read and written by vectors. Results are the
interpreter's, nothing beside them is written."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.language import kernel as target
from tinygrad_nv.language import *
from tinygrad_nv.runtime.cpu.program import load

RANDOM = np.random.default_rng(8)
LEVELS = isa.there()
ROWS, TAKEN = 24, 11    # of a table, and rows that are taken from it


@kernel(grid=(1,))
def take(table: KTile["V", "D"], ids: KTile["N", int32], out: OTile["N", "D", f32], *, first: int, size: int,
         last: int):
    """Columns of rows; columns from `last` on are 0.5."""
    columns = tile.block(first, size)
    chosen = ids[tile.block(0, ids.shape[0])]
    mask = (columns.indices < last)[None, :]
    out[:, columns] = tile.load(table, chosen, columns, mask=mask, other=0.5)


@kernel(grid=(1,))
def put(x: KTile["N", "D"], ids: KTile["N", int32], out: OTile[ROWS, "D", f32], *, first: int, size: int,
        last: int):
    """Rows at their places, columns ahead of `last` alone."""
    columns = tile.block(first, size)
    chosen = ids[tile.block(0, ids.shape[0])]
    tile.store(out, x[:, columns], chosen, columns, mask=(columns.indices < last)[None, :])


@kernel(grid=(1,))
def turn(x: KTile["N", "D"], ids: KTile["N", int32], out: OTile["N", "D", f32], *, first: int, size: int,
         last: int):
    """The columns of every row in the other order, those ahead of `last`."""
    columns = last - 1 - tile.arange(x.shape[1])
    out[:, :] = tile.load(x, tile.block(0, x.shape[0]), columns)


@kernel(grid=(1,))
def repeat(x: KTile["N", "D"], ids: KTile["N", int32], out: OTile["N", "D", f32], *, first: int, size: int,
           last: int):
    """Every row's element in a column, all along it."""
    rows = tile.broadcast_to(tile.arange(x.shape[0])[:, None], x.shape)
    out[:, :] = tile.load(x, rows, tile.broadcast_to(ids[tile.block(0, ids.shape[0])][:, None], x.shape))


def arrays(fn: Any, d: int) -> list[np.ndarray]:
    """A table or rows, and rows of the table, some beyond it, each once."""
    ids = RANDOM.permutation(np.arange(-2, ROWS + 2))[:TAKEN].astype(np.int32)
    return [RANDOM.standard_normal((ROWS if fn is take else TAKEN, d)).astype(np.float32), ids]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [take, put, turn, repeat], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(("d", "first", "size", "last"), [
    (64, 0, 64, 64), (64, 0, 64, 40), (64, 0, 64, 37), (40, 0, 40, 40), (37, 0, 37, 37), (64, 3, 21, 64),
    (48, 32, 32, 48), (7, 0, 7, 7), (40, -5, 32, 40)])
def test_rows(level: str, fn: Any, d: int, first: int, size: int, last: int):
    """Whole rows and parts, what is beyond the table and the last column, vectors that a mask cuts."""
    given = arrays(fn, d)
    tensors = [Tensor(x).realize() for x in given]
    made = fn.program(*tensors, first=first, size=size, last=last)
    out = next(each for each in made.tensors if each.output)
    named = {"table": given[0], "x": given[0], "ids": given[1]}
    found = np.zeros(out.shape, np.float32)
    load(target.build(made, isa.of_level(level)))(*(named.get(each.name, found) for each in made.tensors),
                                                  threads=1)
    want = fn.interpret(*tensors, first=first, size=size, last=last)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("fn", [take, put], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(("last", "by_lanes"), [(64, 0), (32, 0), (37, 1)])
def test_rows_are_moved_by_vectors(fn: Any, last: int, by_lanes: int):
    """A mask that cuts a vector is asked for each of its elements."""
    tensors = [Tensor(x).realize() for x in arrays(fn, 64)]
    text = fn.source(*tensors, first=0, size=64, last=last).rpartition("NOINLINE void body")[2]
    assert text.count("for (s64 l") == by_lanes
