"""Rows of a CTA: a number of work becomes a group and some of its rows, on the device.

Protocol: groups are cut into tiles of so many rows; tiles are numbered group after group. There are at most
`most_tiles`, which is the grid: CTAs of numbers beyond those that there are end at once. Each warp finds its
tile by itself, from the offsets: a lane has some groups side by side.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec

MOST_GROUPS = 1024      # 32 of a lane


def most_tiles(spec: GroupedGemmSpec, rows: int) -> int:
    """Tiles of `rows` rows that there may be: all but the last of a group are full."""
    return (spec.rows + min(spec.groups, spec.rows) * (rows - 1)) // rows


@dataclass(frozen=True)
class Tile:
    """`rows` rows of a group, from row `first` of all on."""
    group: Value
    first: Value
    rows: Value


def tile_of(kb: Kernel, spec: GroupedGemmSpec, offsets: Value, number: Value, rows: int) -> Tile:
    """The tile of a number; where there is none the CTA ends."""
    lane, each = kb.special("laneid"), -(-spec.groups // 32)
    with kb.comment("the group and the rows of this CTA"):
        own = lane * each if each > 1 else lane
        ends = []
        for i in range(each + 1):   # beyond the last group there are no rows
            place = kb.reg("u32")
            kb.emit("min.u32", place, own + i if i else own, spec.groups)
            ends.append(kb.ld("global", "s32", advance(kb, offsets, place, 4).at())[0])
        tiles = [(end - begin + (rows - 1)) // rows for begin, end in pairwise(ends)]
        until = kb.reg("s32", tiles[0])
        for more in tiles[1:]: until += more
        mine = kb.reg("s32", until)
        for distance in (1, 2, 4, 8, 16):
            other = kb.reg("s32")
            kb.emit("shfl.sync.up.b32", other, until, distance, 0, -1)
            kb.emit("add.s32", until, until, other, guard=lane >= distance)
        left = number.to("s32") - (until - mine)    # tiles of the lane's groups before the one sought
        votes, source = kb.reg("b32"), kb.reg("u32")
        kb.emit("vote.sync.ballot.b32", votes, (left >= 0) & (left < mine), -1)
        kb.emit("exit", guard=votes == 0)
        kb.emit("popc.b32", source, votes - 1)
        found = [kb.reg("s32", 0) for _ in range(3)]
        for i, count in enumerate(tiles):
            here = (left >= 0) & (left < count)
            for value, known in zip(found, ((own + i).to("s32"), ends[i] + left * rows, ends[i + 1]),
                                    strict=True):
                kb.emit("mov.s32", value, known, guard=here)
            left = left - count
        group, first, end = (_from(kb, value, source) for value in found)
        there = kb.reg("s32")
        kb.emit("min.s32", there, end - first, rows)
    return Tile(*(each.to("u32") for each in (group, first, there)))


def _from(kb: Kernel, value: Value, lane: Value) -> Value:
    """Another lane's."""
    made = kb.reg(value.kind)
    kb.emit("shfl.sync.idx.b32", made, value, lane, 31, -1)
    return made
