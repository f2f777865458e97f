"""Which tiles a CTA makes, and where they lie: persistent CTAs, tiles in grouped order.

Protocol: tiles are numbered, and a cluster takes every number that is its own plus a multiple of how many
clusters there are. `group` rows of tiles are walked together, columns outermost, so that what the CTAs of
one moment read is about as many rows as columns, and stays in L2. A cluster's CTAs have neighbouring tiles:
one number is `cluster_m` × `cluster_n` of them.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder_values import Number
from tinygrad_nv.tile.templates.wgmma_plan import Plan


@dataclass(frozen=True)
class Corner:
    """Where a tile begins: row, column, index along each dimension of the batch (u32)."""
    m: Value
    n: Value
    batch: tuple[Value, ...]


class Walk:
    """The walk over the tiles of a plan whose result has `rows` rows."""

    def __init__(self, k: Kernel, plan: Plan, rows: Value | int) -> None:
        self.k, self.plan, s = k, plan, plan.schedule
        rows_of_tile = s.block_m * s.cluster_m
        self.tiles_n = plan.extents[1]
        self.tiles_m: Number = plan.extents[0] if isinstance(rows, int) else \
            (rows + (rows_of_tile - 1)) // rows_of_tile
        self.total: Number = self.tiles_m * (self.tiles_n * plan.spec.matrices)
        self.first, self.step = k.ctaid.x, k.nctaid.x
        if plan.cluster > 1: self.first, self.step = self.first // plan.cluster, self.step // plan.cluster

    def corner(self, number: Value) -> Corner:
        """Where this CTA's tile of a number begins."""
        s, batch, rest = self.plan.schedule, [], number
        if self.plan.spec.batch:
            matrix, rest = self._split(number, self.tiles_m * self.tiles_n)
            for extent in reversed(self.plan.spec.batch):
                matrix, index = self._split(matrix, extent)
                batch.append(index)
        tile_m, tile_n = self._grouped(rest)
        if self.plan.cluster > 1:
            rank = self.k.special("cluster_ctarank")
            if s.cluster_m > 1: tile_m = tile_m * s.cluster_m + rank % s.cluster_m
            if s.cluster_n > 1: tile_n = tile_n * s.cluster_n + rank // s.cluster_m
        return Corner(tile_m * s.block_m, tile_n * self.plan.columns, tuple(batch[::-1]))

    def _split(self, number: Value, extent: Number) -> tuple[Value, Value]:
        """Quotient and remainder."""
        if isinstance(extent, int) and extent == 1: return number, self.k.reg("u32", 0)
        whole = number // extent
        return whole, number - whole * extent

    def _grouped(self, number: Value) -> tuple[Value, Value]:
        """Row and column of a tile among those of one matrix."""
        group, rows = self.plan.schedule.group, self.tiles_m
        if isinstance(rows, int) and rows <= group:
            column, row = self._split(number, rows)
            return row, column
        which, rest = self._split(number, group * self.tiles_n)
        first = which * group
        if isinstance(rows, int) and rows % group == 0: height: Number = group
        else:
            height = self.k.reg("u32")
            self.k.emit("min.u32", height, self.k.reg("u32", rows) - first, group)
        column, row = self._split(rest, height)
        return first + row, column
