"""Epilogue of consumers: they hand the sums of a tile to result_store.py as cells of 16 × 8.

Protocol: registers 4j … 4j + 3 of a wgmma's sums are columns 8j … 8j + 7 of its 64 rows, of which warp p of
the warpgroup has 16 from 16p. Columns of several parts follow one another: a thread holds all parts of its
elements.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.wgmma.main_loop import Sums
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP, WgmmaPlan
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.result_store import Store
from tinygrad_nv.tile.share import Cell


class WgmmaEpilogue:
    """The epilogue of a tile."""

    def __init__(self, kb: Kernel, plan: WgmmaPlan, out: Value, extras: list[Value],
                 rows: Value | int) -> None:
        self.kb, self.plan = kb, plan
        how = plan.store
        staging = kb.shared("staging", how.smem_bytes, align=1024) if how.smem_bytes else None
        self.maps: tuple[MapArgument, ...] = (how.map,) if how.map else ()
        self.tensor_maps = [kb.tensor_map("map_out")] if how.map else []
        self.to = Store(kb, plan.spec.store_target, how, out, extras, rows, staging,
                        self.tensor_maps[0] if how.map else None)

    def store(self, corner: Corner, consumer: Value, sums: Sums, columns: range | None = None) -> None:
        """Stores the sums of a tile, or of a consumer's rows of it; of some columns only, whole `unit`s."""
        kb, plan = self.kb, self.plan
        m = corner.m + (kb.tid.x % WARPGROUP >> 5) * 16
        if plan.readers > 1: m = m + consumer * plan.rows
        self.to.tile(m, corner.n, corner.batch, self.cells(sums, columns or range(plan.columns)))

    @property
    def unit(self) -> int:
        """Columns that are stored together."""
        panel = self.to.plan.panel
        return 8 if panel is None else panel.extents(self.plan.spec.out.dtype.itemsize)[1]

    def cells(self, sums: Sums, columns: range) -> list[Cell]:
        """Returns the cells of some columns that a warp holds."""
        part, parts = self.plan.columns // 2, range(self.plan.spec.parts)
        return [Cell(64 * i, 8 * j, [row[part * p + 4 * j:part * p + 4 * j + 4] for p in parts])
                for i, row in enumerate(sums) for j in range(columns.start // 8, columns.stop // 8)]
