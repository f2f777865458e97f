"""Filters by counts (spec.py), top-k, as a program of the tile language: the largest key that enough keys
reach.

    a program has a row; of its blocks the largest `SLOTS` keys at each place of a block stay in registers
    floor = the largest t that as many of these reach as are wanted, by its bits from the highest on
    where a key that did not stay may be above it: the same of the whole row, from the floor up
    out = x where key ≥ t, else -inf

Counts are whole numbers, so that their order does not matter. The largest keys of a row hardly ever share a
place with `SLOTS` others, and of a row of few blocks all keys stay.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.sampling.spec import MOST_FIRST, FilterSpec

S32, U32 = dtypes.int32, dtypes.uint32
LEAST, SIGN = -1 << 31, 1 << 31
SLOTS = 4
DEEP = 4            # blocks that are loaded together
VECTOR, THREADS, FEWEST = 4, 1024, 128      # of a GPU's program: elements side by side, threads
SHORT = 1 << 13         # logits of a row up to which a CPU's blocks are
CPU_COLUMNS = 128, 512  # so long, and beyond


class Row:
    """A row's keys, in blocks of `width`: float32 as int32 in the order of numbers, the least beyond the row.
    Whole blocks end at `whole`."""

    def __init__(self, logits: TensorRef, number: Tile, width: int) -> None:
        self.logits, self.number, self.width = logits, number, width
        self.size = logits.shape[-1]
        self.whole = self.size // width * width

    def load(self, first: Operand) -> Tile:
        """The keys of a block."""
        return order(self.logits[self.number, Block(first, self.width)])

    def load_rest(self) -> Tile:
        """The keys behind whole blocks."""
        return tile.where(self.whole + tile.arange(self.width) < self.size, self.load(self.whole), LEAST)


def order(x: Tile) -> Tile:
    """Bits of float32 as int32 in the order of numbers."""
    bits = tile.bitcast(x, S32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def top_k(out: TensorRef, logits: TensorRef, numbers: TensorRef, spec: FilterSpec, blocks: Blocks) -> None:
    """From logits to those that are kept, -inf for the others."""
    row, target = Row(logits, tile.program_id(0), blocks.columns), numbers[tile.program_id(0), spec.number]
    found = tile.full((), LEAST, S32)
    if target <= float(spec.size): found = search(row, target)
    keep(out, row, found)


def keep(out: TensorRef, row: Row, found: Tile) -> None:
    """Stores the result, blocks that are loaded together after each other."""
    deep = row.whole // (DEEP * row.width) * DEEP * row.width
    for first in tile.range(0, deep, DEEP * row.width):
        keep_blocks(out, row, [Block(first + i * row.width, row.width) for i in range(DEEP)], found)
    for first in tile.range(deep, row.whole, row.width):
        keep_blocks(out, row, [Block(first, row.width)], found)
    if row.whole < row.size: keep_blocks(out, row, [Block(row.whole, row.size - row.whole)], found)


def keep_blocks(out: TensorRef, row: Row, blocks: Sequence[Block], found: Tile) -> None:
    """Stores blocks of the result."""
    loaded = [row.logits[row.number, at] for at in blocks]
    for at, x in zip(blocks, loaded, strict=True):
        out[row.number, at] = tile.where(order(x) >= found, x, -inf)


def search(row: Row, target: Tile) -> Tile:
    """The largest key that as many keys reach as are wanted."""
    rest = [row.load_rest()] if row.whole < row.size else []
    if row.size <= SLOTS * row.width:
        held = rest + [row.load(first) for first in range(0, row.whole, row.width)]
        return bisect(lambda edge: reach(count_tiles(held, edge), target))
    slots = tuple([tile.full((row.width,), LEAST, S32)] * SLOTS)
    for key in rest: slots = insert(slots, key)
    for first in tile.range(0, row.whole, row.width): slots = insert(slots, row.load(first))
    found = bisect(lambda edge: reach(count_tiles(slots, edge), target))
    if tile.max(slots[-1], 0) > found:
        most, floor = tile.max(slots[0], 0), found
        found = bisect(lambda edge: reach(count_row(row, edge, floor, most), target))
    return found


def insert(slots: Sequence[Tile], key: Tile) -> tuple[Tile, ...]:
    """The largest of slots, which are in order, and of keys."""
    made = []
    for slot in slots:
        made.append(tile.maximum(slot, key))
        key = tile.minimum(slot, key)
    return tuple(made)


def reach(count: Tile, target: Tile) -> Tile:
    """Whether so many keys are as many as are wanted."""
    return tile.cast(count, dtypes.float32) >= target


def bisect(enough: Callable[[Tile], Tile]) -> Tile:
    """The largest key that enough others reach, the least of all where there is none: by its bits from the
    highest on, as a number without a sign."""
    found = tile.full((), 0, U32)
    for turn in tile.range(32):
        trial = found | tile.full((), SIGN, U32) >> tile.cast(turn, U32)
        found = tile.where(enough(tile.bitcast(trial ^ SIGN, S32)), trial, found)
    return tile.bitcast(found ^ SIGN, S32)


def count_tiles(keys: Sequence[Tile], edge: Tile) -> Tile:
    """How many keys are not below an edge."""
    total = tile.cast(keys[0] >= edge, S32)
    for key in keys[1:]: total += tile.cast(key >= edge, S32)
    return tile.sum(total, 0)


def count_row(row: Row, edge: Tile, floor: Tile, most: Tile) -> Tile:
    """How many keys of a row are not below an edge: up to a floor enough, above the most none."""
    made = tile.where(edge > most, 0, row.size)
    if (edge > floor) & (edge <= most):
        total = tile.zeros((row.width,), S32)
        if row.whole < row.size: total = tile.cast(row.load_rest() >= edge, S32)
        for first in tile.range(0, row.whole, row.width): total += tile.cast(row.load(first) >= edge, S32)
        made = tile.sum(total, 0)
    return made


def cut(spec: FilterSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks as long as there are threads for, of a vector each, but no longer than a row."""
    if target.kind == "cpu": return [(Blocks(1, CPU_COLUMNS[spec.size > SHORT]), 1)]
    threads = THREADS
    while threads > FEWEST and threads * VECTOR >= spec.size: threads //= 2
    return [(Blocks(1, VECTOR * threads), threads // 32)]


def grid(spec: FilterSpec, blocks: Blocks) -> Grid:
    """A program for each row."""
    return spec.rows, 1, 1


def vector_of(spec: FilterSpec) -> int:
    """Elements that a thread loads at once."""
    return VECTOR if spec.size % VECTOR == 0 else 1


def problems(spec: FilterSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    if not spec.counted: return ["sums of weights, whose order counts"]
    return [f"{spec.size} logits of a row, at most {MOST_FIRST}"] * (spec.size > MOST_FIRST)


TOP_K = TileProgram("counted_threshold", FilterSpec, top_k, grid, cut, lambda spec: spec.rows * spec.size,
                    problems, vector=vector_of)
