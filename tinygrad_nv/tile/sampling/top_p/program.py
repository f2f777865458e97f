"""Filters by mass (spec.py), top-p, as a program of the tile language: the largest key of which the mass
reaches the target.

    a program has a row; weights are whole units (`Units`), so that the order of sums does not matter
    of a row of few blocks keys and units stay in registers; of a longer one
        low, high = logits between which the threshold seems to lie: `ROUNDS` times, by sums of floats above
                    `EDGES` logits between them
        the keys between them and their units stay, `SLOTS` of each place of a block; those above are added up
    t = the largest key of which the mass reaches the target, by its bits from the highest on: of what stayed,
        or of the whole row where that is not all, or does not have the target
    out = x where key ≥ t, else -inf

Sums of floats may be rounded anyhow: what they say is held against sums of units.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.programs import Blocks, TileProgram
from tinygrad_nv.tile.sampling.spec import MOST_FIRST, MOST_UNITS, FilterSpec
from tinygrad_nv.tile.sampling.top_k.program import (
    DEEP,
    FEWEST,
    LEAST,
    S32,
    U32,
    VECTOR,
    Row,
    bisect,
    grid,
    keep,
    order,
    vector_of,
)

F32 = dtypes.float32
LARGEST = (1 << 31) - 1
PLACES = 12         # bits of a block's elements at most
THREADS = 512
EDGES, ROUNDS = 4, 6
SLOTS, HELD = 3, 4
LENGTHS = 1 << 13, 1 << 16      # of rows, up to which a CPU's blocks are
CPU_COLUMNS = 256, 512, 1024    # so long, and beyond
CROWD = 0.12        # keys at a place of a block, of which hardly any has more than `SLOTS` then
OVER, UNDER = 1.0001, 0.9999    # of the target: sums of floats that are surely enough, or too little


class WeightedRow(Row):
    """A row's logits with their weights; beyond the row without any."""

    def __init__(self, logits: TensorRef, weights: TensorRef, number: Tile, width: int) -> None:
        super().__init__(logits, number, width)
        self.weights = weights

    def load_pair(self, first: Operand) -> tuple[Tile, Tile]:
        """The logits and the weights of a block."""
        at = self.number, Block(first, self.width)
        return self.logits[at], self.weights[at]

    def spread(self, value: Operand, dtype: Any = F32) -> Tile:
        """A number at each place of a block."""
        return tile.full((self.width,), value, dtype)


def fold(row: WeightedRow, state: Sequence[Tile], add: Callable[..., Sequence[Tile]]) -> Sequence[Tile]:
    """Applies a function to a state, logits and weights of each block, and which of them there are."""
    made = state
    if row.whole < row.size:
        inside = row.whole + tile.arange(row.width) < row.size
        made = add(made, *row.load_pair(row.whole), inside)
    deep = row.whole // (DEEP * row.width) * DEEP * row.width
    for first in tile.range(0, deep, DEEP * row.width):
        pairs = [row.load_pair(first + i * row.width) for i in range(DEEP)]
        for each in pairs: made = add(made, *each, True)
    for first in tile.range(deep, row.whole, row.width): made = add(made, *row.load_pair(first), True)
    return made


class Units:
    """Whole units of a target: `goal` of them are enough."""

    def __init__(self, target: Tile) -> None:
        exponent = tile.bitcast(target, S32) >> 23
        self.scale = tile.bitcast(tile.minimum(283 - exponent, 254) << 23, F32)
        self.goal = tile.cast(tile.ceil(tile.maximum(target, 0.0) * self.scale), U32)

    def count(self, weights: Tile) -> Tile:
        """Weights in units."""
        scaled = weights * self.scale
        some = tile.where(scaled > 0.0, tile.minimum(scaled, float(MOST_UNITS)), 0.0)
        return tile.cast(tile.round(some), U32)


def top_p(out: TensorRef, logits: TensorRef, weights: TensorRef, numbers: TensorRef, spec: FilterSpec,
          blocks: Blocks) -> None:
    """From logits to those that are kept, -inf for the others."""
    number = tile.program_id(0)
    row, target = WeightedRow(logits, weights, number, blocks.columns), numbers[number, spec.number]
    found = tile.full((), LEAST, S32)
    if target < inf: found = search(row, target)
    keep(out, row, found)


def search(row: WeightedRow, target: Tile) -> Tile:
    """The largest key of which the mass reaches the target."""
    units = Units(target)
    if row.size <= HELD * row.width:
        held = hold(row, units)
        return bisect(lambda edge: add_held(held, edge) >= units.goal)
    low, high = estimate(row, target)
    floor, most = order(low), order(high) - 1
    base, count, *held = collect(row, units, floor, most)
    above = join(base)
    def reach_held(edge: Tile) -> Tile: return above + add_held(held, edge) >= units.goal
    def reach(edge: Tile) -> Tile: return add_row(row, units, edge) >= units.goal
    if (above < units.goal) & (tile.max(count, 0) <= SLOTS) & reach_held(floor):
        found = bisect(lambda edge: between(edge, floor, most, reach_held))
    else:
        floor = tile.where(reach(floor), floor, LEAST)
        most = tile.where(above < units.goal, most, LARGEST)
        found = bisect(lambda edge: between(edge, floor, most, reach))
    return found


def hold(row: WeightedRow, units: Units) -> list[Tile]:
    """The keys of all blocks, then their units."""
    pairs = [row.load_pair(first) for first in range(0, row.size, row.width)]
    return [*[order(x) for x, _ in pairs], *[units.count(weights) for _, weights in pairs]]


def estimate(row: WeightedRow, target: Tile) -> tuple[Tile, Tile]:
    """Logits between which the threshold seems to lie, the second infinity where none is above."""
    def look(state: Sequence[Tile], x: Tile, weights: Tile, inside: Operand) -> Sequence[Tile]:
        finite = (abs(x) < inf) & inside
        most, total, many = state
        return (tile.where(finite, tile.maximum(most, x), most), tile.where(finite, total + x, total),
                tile.where(finite, many + 1.0, many))
    most, total, many = fold(row, [row.spread(-inf), row.spread(0.0), row.spread(0.0)], look)
    top, mean = tile.max(most, 0), tile.sum(total, 0) / tile.sum(many, 0)
    low, high = tile.minimum(mean - (top - mean), top), tile.full((), inf, F32)
    top = top + (top - mean) / 16.0
    for turn in tile.range(ROUNDS):
        if is_crowded(row, low, high): low, high = narrow(row, target, low, high, top, turn == 0)
    return low, high


def is_crowded(row: WeightedRow, low: Tile, high: Tile) -> Tile:
    """Whether more logits lie between two than there is room for, if a row is as its first blocks."""
    many = tile.zeros((row.width,), S32)
    for first in range(0, DEEP * row.width, row.width):
        x = row.logits[row.number, Block(first, row.width)]
        many += tile.cast((x >= low) & (x < high), S32)
    return tile.cast(tile.sum(many, 0), F32) > CROWD * DEEP * row.width * row.width / row.size


def narrow(row: WeightedRow, target: Tile, low: Tile, high: Tile, top: Tile, dense: Tile
           ) -> tuple[Tile, Tile]:
    """The neighbours, of logits between two, between which the threshold seems to lie. These are evenly
    spaced, or `dense` near the top."""
    top, parts = tile.minimum(high, top), [(i + 1) / (EDGES + 1) for i in reversed(range(EDGES))]
    edges = [top - (top - low) * tile.where(dense, part * part, part) for part in parts]
    def add(sums: Sequence[Tile], x: Tile, weights: Tile, inside: Operand) -> Sequence[Tile]:
        return [tile.where(x >= edge, total + weights, total)
                for total, edge in zip(sums, edges, strict=True)]
    found = [tile.sum(each, 0) for each in fold(row, [row.spread(0.0)] * EDGES, add)]
    for edge, mass in zip(edges, found, strict=True): low = tile.where(mass > target * OVER, edge, low)
    for edge, mass in reversed([*zip(edges, found, strict=True)]):
        high = tile.where(mass < target * UNDER, edge, high)
    return low, high


def collect(row: WeightedRow, units: Units, floor: Tile, most: Tile) -> Sequence[Tile]:
    """At each place of a block: the units above the most, how many keys there are from the floor on up to it,
    the last of these, and their units."""
    def add(state: Sequence[Tile], x: Tile, weights: Tile, inside: Operand) -> Sequence[Tile]:
        base, count, *held = state
        key = order(x)
        here = tile.where_needed(key >= floor, lambda: units.count(weights), 0)
        wanted = (key >= floor) & (key <= most) & inside
        moved = key, *held[:SLOTS - 1], here, *held[SLOTS:-1]
        return (tile.where(key > most, add_units(base, here), base), tile.where(wanted, count + 1, count),
                *[tile.where(wanted, new, old) for new, old in zip(moved, held, strict=True)])
    return fold(row, [row.spread(0, U32), row.spread(0, S32), *[row.spread(LEAST, S32)] * SLOTS,
                     *[row.spread(0, U32)] * SLOTS], add)


def add_units(total: Tile, more: Tile) -> Tile:
    """A sum of units, as far as there are numbers."""
    return tile.minimum(total + more, LARGEST)


def add_held(held: Sequence[Tile], edge: Tile) -> Tile:
    """The units of keys that are not below an edge."""
    half = len(held) // 2
    some = [tile.where(key >= edge, units, 0) for key, units in zip(held[:half], held[half:], strict=True)]
    total = some[0]
    for each in some[1:]: total = add_units(total, each)
    return join(total)


def add_row(row: WeightedRow, units: Units, edge: Tile) -> Tile:
    """The units of a row's keys that are not below an edge."""
    def add(state: Sequence[Tile], x: Tile, weights: Tile, inside: Operand) -> Sequence[Tile]:
        return [add_units(state[0], tile.where(order(x) >= edge, units.count(weights), 0))]
    return join(fold(row, [row.spread(0, U32)], add)[0])


def join(total: Tile) -> Tile:
    """A sum over a block, 2^31 and a little more for all that is larger: of upper bits and of lower ones."""
    low = tile.sum(total & (1 << PLACES) - 1, 0)
    high = tile.sum(total >> PLACES, 0) + (low >> PLACES)
    return (tile.minimum(high, 1 << 31 - PLACES) << PLACES) + (low & (1 << PLACES) - 1)


def between(edge: Tile, floor: Tile, most: Tile, reach: Callable[[Tile], Tile]) -> Tile:
    """Whether enough keys reach an edge: up to a floor they do, above the most they do not."""
    made = edge <= floor
    if (edge > floor) & (edge <= most): made = reach(edge)
    return made


def cut(spec: FilterSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks as long as there are threads for, of a vector each, but no longer than a row."""
    longer = sum(spec.size > each for each in LENGTHS)
    if target.kind == "cpu": return [(Blocks(1, CPU_COLUMNS[longer]), 1)]
    threads = THREADS
    while threads > FEWEST and threads * VECTOR >= spec.size: threads //= 2
    return [(Blocks(1, VECTOR * threads), threads // 32)]


def problems(spec: FilterSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    if spec.counted: return ["counts, which have no weights"]
    return [f"{spec.size} logits of a row, at most {MOST_FIRST}"] * (spec.size > MOST_FIRST)


TOP_P = TileProgram("threshold", FilterSpec, top_p, grid, cut, lambda spec: spec.rows * spec.size,
                    problems, vector=vector_of)
