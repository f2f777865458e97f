"""Tile scheduler of groups: persistent CTAs, tiles of groups whose extents are read on the device.

Protocol: `count` is called by one warp before a barrier of all: it reads the offsets and leaves in shared
memory, for each group, its first row and the number of its first tile; group e has ceil(rows / tokens) times
`tiles_across` tiles. A CTA takes every number that is its own plus a multiple of how many CTAs there are.
`tile` finds a number's group by two ballots: among the lanes' shares of the groups, then within one. Tiles of
rows of one matrix are neighbours, so that CTAs of one moment read the same columns of it.

All lanes of a warp take part in `work_tiles`.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import group_order
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import LANES, GroupedPlan
from tinygrad_nv.tile.lanes import count_lanes


@dataclass(frozen=True)
class GroupTile:
    """A tile of group `group`: rows from `row` to before `end` at most, columns of the result from `column`
    (u32)."""
    group: Value
    row: Value
    end: Value
    column: Value


class GroupTileScheduler:
    """The work tiles of a CTA; `offsets` are the kernel's."""

    def __init__(self, kb: Kernel, plan: GroupedPlan, offsets: Value) -> None:
        self.kb, self.plan, self.offsets = kb, plan, offsets
        count = LANES * plan.each
        self.lane_ends = kb.shared("lane_ends", 4 * LANES)
        self.first_tiles = kb.shared("first_tiles", 4 * (count + 1))
        self.first_rows = kb.shared("first_rows", 4 * (count + 1))

    def count(self) -> None:
        """One warp counts the tiles of all groups, each lane those of its share."""
        kb, plan, lane = self.kb, self.plan, self.kb.special("laneid")
        own = lane * plan.each
        rows = [self._offset(own + i) for i in range(plan.each + 1)]
        ends = [kb.reg("u32", 0)]
        for first, end in pairwise(rows):
            ends.append(ends[-1] + (end - first + (plan.tokens - 1)) // plan.tokens * plan.tiles_across)
        total = self._scan_lanes(ends[-1])
        before = total - ends[-1]
        kb.st("shared", "u32", (self.lane_ends.address() + lane * 4).at(), total)
        tiles, starts = (each.address() + own * 4 for each in (self.first_tiles, self.first_rows))
        last = len(rows) - 1    # the next lane's first, but for the last lane
        for i, (tile, row) in enumerate(zip(ends, rows, strict=True)):
            guard = lane == LANES - 1 if i == last else None
            kb.emit("st.shared.u32", tiles.at(4 * i), before + tile, guard=guard)
            kb.emit("st.shared.u32", starts.at(4 * i), row, guard=guard)

    def _offset(self, group: Value) -> Value:
        """The first row of a group; beyond the last one, its end."""
        kb, made = self.kb, self.kb.reg("u32")
        kb.emit("min.u32", made, group, self.plan.grouped.groups)
        return kb.ld("global", "u32", advance(kb, self.offsets, made, 4).at())[0]

    def _scan_lanes(self, value: Value) -> Value:
        """Returns the sum of all lanes up to this one."""
        kb, lane, distance = self.kb, self.kb.special("laneid"), 1
        while distance < LANES:
            other = kb.reg("u32")
            kb.emit("shfl.sync.up.b32", other, value, distance, 0, -1)
            value = value + kb.select(lane >= distance, other, 0, "u32")
            distance *= 2
        return value

    @contextmanager
    def work_tiles(self, turn: Value | None = None) -> Iterator[GroupTile]:
        """Emits the code inside so that it is done for each tile of this CTA; for those of one of the
        consumers where these take turns."""
        kb = self.kb
        first, step = kb.ctaid.x, kb.nctaid.x
        if turn is not None: first, step = first + turn * step, step * self.plan.consumers
        total = kb.ld("shared", "u32", self.first_tiles.at(4 * LANES * self.plan.each))[0]
        with kb.loop(first, total, step) as number: yield self.tile(number)

    def tile(self, number: Value) -> GroupTile:
        """The tile of a number."""
        kb, plan = self.kb, self.plan
        group = self._group(number)
        tiles, rows = (each.address() + group * 4 for each in (self.first_tiles, self.first_rows))
        first_tile = kb.ld("shared", "u32", tiles.at())[0]
        begin, end = (kb.ld("shared", "u32", rows.at(4 * i))[0] for i in range(2))
        down = (end - begin + (plan.tokens - 1)) // plan.tokens
        row, column = group_order(kb, number - first_tile, down, plan.tiles_across, plan.schedule.group)
        return GroupTile(group, begin + row * plan.tokens, end, column * plan.tile_columns)

    def _group(self, number: Value) -> Value:
        """The group of a tile: as many as end before it."""
        kb, each, lane = self.kb, self.plan.each, self.kb.special("laneid")
        ended = kb.ld("shared", "u32", (self.lane_ends.address() + lane * 4).at())[0]
        share = count_lanes(kb, ended <= number)
        if each == 1: return share
        own = kb.reg("u32")
        kb.emit("min.u32", own, lane, each - 1)
        group = share * each
        ended = kb.ld("shared", "u32", (self.first_tiles.address() + (group + own) * 4).at(4))[0]
        return group + count_lanes(kb, (ended <= number) & (lane < each))
