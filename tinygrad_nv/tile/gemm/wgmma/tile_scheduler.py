"""Tile scheduler of matmuls, and where tiles lie: persistent CTAs, tiles in grouped order.

Protocol: tiles are numbered, and a cluster takes every number that is its own plus a multiple of how many
clusters there are. `group` rows of tiles are walked together, columns outermost, so that what the CTAs of
one moment read is about as many rows as columns, and stays in L2. A cluster's CTAs have neighbouring tiles:
one number is `cluster_m` × `cluster_n` of them.

What a CTA does at once is a `WorkTile`: a tile, or some of its stages. With splits each CTA of a cluster has
an equal part (but for one stage) of the one tile of the cluster. With stream-K (Osama et al. 2023) the first
tiles are streamed: those that would not fill the last wave, and a wave more where there is one. Their stages
are one row, of which every cluster has an equal part, that it goes through from the last stage back: at most
the beginning of one tile, then whole tiles, then the end of another. The other tiles follow as waves do.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan


@dataclass(frozen=True)
class Corner:
    """Corner of a tile: row, column, index along each dimension of the batch (u32)."""
    m: Value
    n: Value
    batch: tuple[Value, ...]


@dataclass(frozen=True)
class WorkTile:
    """Work tile `number`, `count` stages from `first` on."""
    number: Value
    first: Value | int
    count: Value | int


class PersistentTileScheduler:
    """The work tiles of a plan whose result has `rows` rows, of one of `ctas` CTAs."""

    def __init__(self, kb: Kernel, plan: WgmmaPlan, rows: Value | int, ctas: int) -> None:
        self.kb, self.plan, self.ctas, s = kb, plan, ctas, plan.schedule
        rows_of_tile = s.block_m * s.cluster_m
        self.tiles_n = plan.extents[1]
        self.tiles_m: Value | int = plan.extents[0] if isinstance(rows, int) else \
            (rows + (rows_of_tile - 1)) // rows_of_tile
        self.total: Value | int = self.tiles_m * (self.tiles_n * plan.spec.matrices)
        self.first, self.step = kb.ctaid.x, kb.nctaid.x
        if plan.cluster > 1: self.first, self.step = self.first // plan.cluster, self.step // plan.cluster
        if plan.schedule.stream: self.streamed = self._count_streamed()

    @contextmanager
    def work_tiles(self, turn: Value | None = None) -> Iterator[WorkTile]:
        """Emits the code inside so that it is done for each work tile of this CTA; for those of one of the
        consumers where these take turns."""
        kb, plan = self.kb, self.plan
        if plan.schedule.stream:
            with self._stream_tiles() as work_tile: yield work_tile
        elif (splits := plan.schedule.splits) > 1:
            rank = kb.special("cluster_ctarank")
            first = rank * plan.iterations // splits
            yield WorkTile(self.first, first, (rank + 1) * plan.iterations // splits - first)
        else:
            first, step = self.first, self.step
            if turn is not None: first, step = first + turn * step, step * plan.consumers
            with kb.loop(first, self.total, step) as number: yield WorkTile(number, 0, plan.iterations)

    @property
    def clusters(self) -> int:
        """How many there are."""
        return self.ctas // self.plan.cluster

    def _count_streamed(self) -> Value | int:
        kb, rest, most = self.kb, self.total % self.clusters, self.total
        if isinstance(rest, int): return min(rest + self.clusters, self.total) if rest else 0
        both = kb.reg("u32")
        kb.emit("min.u32", both, rest + self.clusters, most)
        return kb.select(rest == 0, 0, both, "u32")

    @contextmanager
    def _stream_tiles(self) -> Iterator[WorkTile]:
        kb, iterations = self.kb, self.plan.iterations
        begin, end = (kb.reg("u32", self.stage_of(self.first + i)) for i in range(2))
        following = kb.reg("u32", self.first + self.streamed)
        self._begin_next(begin, end, following)
        with kb.while_(lambda: begin < end):
            number = (end - 1) // iterations
            first = kb.reg("u32")
            kb.emit("max.u32", first, begin, number * iterations)
            yield WorkTile(number, first - number * iterations, end - first)
            end.set(first)
            self._begin_next(begin, end, following)

    def _begin_next(self, begin: Value, end: Value, following: Value) -> None:
        """Begins the next whole tile where nothing is left of this part; nothing after the last."""
        with self.kb.if_(begin >= end):
            for stage, number in ((begin, following), (end, following + 1)):
                self.kb.emit("min.u32", stage, number, self.total)
                stage *= self.plan.iterations
            following += self.clusters

    def stage_of(self, cluster: Value) -> Value:
        """The first of the streamed stages that a cluster has: the first ones have one more where they do not
        divide."""
        total = self.streamed * self.plan.iterations
        each = total // self.clusters
        least = self.kb.reg("u32")
        self.kb.emit("min.u32", least, cluster, total - each * self.clusters)
        return cluster * each + least

    def corner(self, number: Value) -> Corner:
        """Returns where this CTA's tile of a number begins."""
        s, batch, rest = self.plan.schedule, [], number
        if self.plan.spec.batch:
            matrix, rest = self._split(number, self.tiles_m * self.tiles_n)
            for extent in reversed(self.plan.spec.batch):
                matrix, index = self._split(matrix, extent)
                batch.append(index)
        tile_m, tile_n = self._group_order(rest)
        if self.plan.cluster > 1:
            rank = self.kb.special("cluster_ctarank")
            if s.cluster_m > 1: tile_m = tile_m * s.cluster_m + rank % s.cluster_m
            if s.cluster_n > 1: tile_n = tile_n * s.cluster_n + rank // s.cluster_m
        return Corner(tile_m * s.block_m, tile_n * self.plan.columns, tuple(batch[::-1]))

    def _split(self, number: Value, extent: Number) -> tuple[Value, Value]:
        """Quotient and remainder."""
        return split(self.kb, number, extent)

    def _group_order(self, number: Value) -> tuple[Value, Value]:
        """Row and column of a tile among those of one matrix."""
        return group_order(self.kb, number, self.tiles_m, self.tiles_n, self.plan.schedule.group)


def split(kb: Kernel, number: Value, extent: Number) -> tuple[Value, Value]:
    """Quotient and remainder."""
    if isinstance(extent, int) and extent == 1: return number, kb.reg("u32", 0)
    whole = number // extent
    return whole, number - whole * extent


def group_order(kb: Kernel, number: Value, rows: Value | int, columns: int,
                  group: int) -> tuple[Value, Value]:
    """Row and column of tile `number` of rows × columns: `group` rows together, columns outermost."""
    if isinstance(rows, int) and rows <= group:
        column, row = split(kb, number, rows)
        return row, column
    which, rest = split(kb, number, group * columns)
    first = which * group
    if isinstance(rows, int) and rows % group == 0: height: Number = group
    else:
        height = kb.reg("u32")
        kb.emit("min.u32", height, kb.reg("u32", rows) - first, group)
    column, row = split(kb, rest, height)
    return first + row, column
