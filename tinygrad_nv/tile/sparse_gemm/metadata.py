"""Metadata of a stage: of each tile of 16 rows, units of 64 columns one after the other, a word for each
lane. The same in memory and in shared memory, so that a warp reads 128 bytes side by side."""
from __future__ import annotations

from tinygrad_nv.quant.sparse import UNIT
from tinygrad_nv.quant.types import TILE

UNIT_WORDS = 32


def nbytes(rows: int, columns: int) -> int:
    """Returns the bytes of so many rows and columns."""
    return rows // TILE * row_bytes(columns)


def row_bytes(columns: int) -> int:
    """Returns the bytes of a tile of 16 rows."""
    return columns // UNIT * UNIT_WORDS * 4


def steps_of_unit(itemsize: int) -> int:
    """Instructions that a unit is for, each with a selector of its own."""
    return 2 if itemsize == 2 else 1
