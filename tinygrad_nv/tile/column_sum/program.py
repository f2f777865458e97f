"""Sums of columns in a fixed order (spec.py) as a program of the tile language.

    a program has a block of columns, and one group of rows:
        for each block of rows: add the terms of rows `lanes` apart, and these to a total of each lane
        once: the rows beyond the last whole block
        store the sums of the lanes
    of several groups, float32 sums [groups, n]; the same program adds these up

On a GPU each warp is a lane, on a CPU there is one. No sum depends on which program runs first: no atomics.
Groups are chosen by the extents alone, so that the order of sums does not depend on the GPU.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.expression import Load, loads
from tinygrad_nv.tile.language.expressions import evaluate, read_leaf
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = OVER_ROWS
WARPS, TOGETHER = 8, 4      # of a GPU's program: each warp has its own rows, so many loaded at a time
MOST_COLUMNS = 512          # of a CPU's program, whose totals stay in a cache
LINE = 64                   # columns that no two threads share: two cache lines of bfloat16
STREAMS = 8                 # rows of all parameters that a CPU reads at a time: 16 take a third longer
MANY_PROGRAMS = 528         # four for each of 132 SMs


def column_sum(out: TensorRef, loads: Mapping[Load, TensorRef], spec: ColumnSumSpec, blocks: Blocks) -> None:
    """From terms [m, n] to sums [n], or [groups, n]."""
    columns, group = tile.block(tile.program_id(0) * blocks.columns, blocks.columns), tile.program_id(1)
    whole, size = spec.m // blocks.rows * blocks.rows, group_rows(spec, blocks)
    total = tile.zeros((blocks.lanes, blocks.columns))
    for m in tile.range(group * size, tile.minimum((group + 1) * size, whole), blocks.rows):
        total += sum_lanes(terms(spec, loads, m, columns, blocks), blocks)
    if whole < spec.m and group == (spec.m - 1) // size:
        there = (tile.arange(blocks.rows) + whole)[:, None] < spec.m
        total += sum_lanes(tile.where(there, terms(spec, loads, whole, columns, blocks), 0.0), blocks)
    made = tile.cast(tile.sum(total, 0), out.dtype)
    if spec.groups > 1: out[group, columns] = made
    else: out[columns] = made


def terms(spec: ColumnSumSpec, loads: Mapping[Load, TensorRef], m: Operand, columns: Block,
          blocks: Blocks) -> Tile:
    """Terms of rows from m on."""
    rows = Block(m, blocks.rows)
    made = evaluate(spec.term, lambda node: read_leaf(node, loads, rows, columns))
    return made.broadcast_to(blocks.rows, blocks.columns)


def sum_lanes(term: Tile, blocks: Blocks) -> Tile:
    """The sums of each lane: of every `lanes`-th row."""
    return tile.sum(term.reshape(blocks.rows // blocks.lanes, blocks.lanes, blocks.columns), 0)


def group_rows(spec: ColumnSumSpec, blocks: Blocks) -> int:
    """Rows of a group: whole blocks."""
    return -(-spec.m // (spec.groups * blocks.rows)) * blocks.rows


def grid(spec: ColumnSumSpec, blocks: Blocks) -> Grid:
    """A program for each block of columns of each group."""
    return -(-spec.n // blocks.columns), spec.groups, 1


def steps(spec: ColumnSumSpec, blocks: Blocks) -> Sequence[tuple[ColumnSumSpec, Blocks]]:
    """One launch, or one of groups and one that adds up their sums."""
    if blocks.groups == 1: return [(spec, blocks)]
    last = ColumnSumSpec(blocks.groups, spec.n, Load(0, dtypes.float32, spec.n, 1), spec.dtype)
    return [(replace(spec, groups=blocks.groups, dtype=dtypes.float32), blocks),
            (last, replace(blocks, groups=1))]


def cut(spec: ColumnSumSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """On a GPU 128 columns, in groups that fill it; on a CPU blocks of one size, of at most 512 and of whole
    lines for as many threads as there are."""
    if target.kind == "cpu":
        count = max(-(-spec.n // MOST_COLUMNS), min(target.threads, -(-spec.n // LINE)))
        columns = -(-spec.n // (16 * count)) * 16
        streams = sum(bool(each.m and each.n) for each in loads(spec.term))
        return [(Blocks(max(1, STREAMS // max(streams, 1)), columns), 1)]
    columns, rows = 128, WARPS * TOGETHER
    most = max(1, MANY_PROGRAMS // -(-spec.n // columns))
    return [(Blocks(rows, columns, max(1, min(most, spec.m // rows)), WARPS), WARPS)]


def problems(spec: ColumnSumSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    out = ["elements of a row lie apart"] * any(each.n not in (0, 1) for each in loads(spec.term))
    out += ["sums of groups of rows"] * (spec.groups > 1)
    return out + ["a flipped operand"] * any(min(x.m, x.n, x.offset) < 0 for x in loads(spec.term))


PROGRAMS = (TileProgram("column_sum", ColumnSumSpec, column_sum, grid, cut, lambda spec: spec.m * spec.n,
                        problems, lambda spec: (spec.term,), steps),)
