"""Epilogue of consumers: they hand the sums of a tile to result_store.py as cells of 16 × 8.

Protocol: registers 4j … 4j + 3 of a wgmma's sums are columns 8j … 8j + 7 of its 64 rows, of which warp p of
the warpgroup has 16 from 16p. Columns of several parts follow one another: a thread holds all parts of its
elements.

Reductions of one tile's sums from several CTAs, always in the same order.

Protocol: `finalize(work_tile, sums)` ends each piece. `TileReduction` is that of whole tiles: it stores them.

`ClusterReduction`: the CTAs of a cluster have parts of the K of the cluster's one tile. Each leaves its sums
in its own shared memory, where the ring was; when all have, each CTA adds up some of the columns, its own
sums first and then those of the ranks after it, and stores these.

`StreamKReduction`: a CTA that has a tile's last stage owns the tile. Those that have earlier stages leave
their sums in their slot of the workspace, and each of their warps says so by a flag; the owner adds them, the
CTA next before it first. With clusters it is CTAs of one rank that have parts of a tile. A CTA goes through
its stages from the last back, so that only its first piece can be of another's tile: it has not waited when
it leaves sums, and one slot is enough. CTAs wait for lower numbers alone. Those start first, so that the grid
ends however few CTAs run at a time, also beside another such grid.

A thread reads sums of threads of its own number in other CTAs: 16 bytes of each lie side by side.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop, Sums
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP, WgmmaPlan
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner, PersistentTileScheduler, WorkTile
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.result_store import Store
from tinygrad_nv.tile.store_plan import Cell

CONSUMERS = 1  # the named barrier of all consumers


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


def cluster_together(kb: Kernel) -> None:
    """Every thread of the cluster is here, and sees what the others wrote."""
    kb.emit("barrier.cluster.arrive")
    kb.emit("barrier.cluster.wait")


class TileReduction:
    """Whole tiles: no other CTA has sums of them."""
    workspace_bytes = 0
    flags = 0

    def __init__(self, main_loop: MainLoop, scheduler: PersistentTileScheduler,
                 epilogue: WgmmaEpilogue) -> None:
        self.main_loop, self.scheduler, self.epilogue = main_loop, scheduler, epilogue
        self.kb, self.plan, self.kind = main_loop.kb, main_loop.plan, main_loop.kind

    def finalize(self, work_tile: WorkTile, sums: Sums) -> None:
        """Ends a piece."""
        self.epilogue.store(self.scheduler.corner(work_tile.number), self.main_loop.consumer, sums)

    def fours(self, sums: Sums, columns: range | None = None) -> Iterator[tuple[int, Sequence[Value]]]:
        """Sums by fours, each with its place among the tile's (in bytes, without the thread's); of some
        columns of every part."""
        count, part = self.plan.schedule.block_n // 8, self.plan.columns // 8
        for i, row in enumerate(sums):
            for j in range(count):
                if columns is None or j % part * 8 in columns:
                    yield (i * count + j) * 16 * self.plan.threads, row[4 * j:4 * j + 4]

    def add(self, space: str, place: Value, sums: Sums, columns: range | None = None) -> None:
        """Adds another CTA's sums."""
        for at, four in self.fours(sums, columns):
            for each, more in zip(four, self.kb.ld(space, self.kind, place.at(at), 4), strict=True):
                each += more


class ClusterReduction(TileReduction):
    """CTAs of a cluster, by way of shared memory."""

    def finalize(self, work_tile: WorkTile, sums: Sums) -> None:
        """All leave their sums; each stores some columns."""
        kb, plan, splits = self.kb, self.plan, self.plan.schedule.splits
        own = self.main_loop.loads.ring.address(kb.tid.x * 16)
        with kb.comment("the ring is no longer read: sums take its place"):
            kb.sync(CONSUMERS, plan.threads)
            for at, four in self.fours(sums): kb.st("shared", self.kind, own.at(at), four)
            cluster_together(kb)
        corner, units = self.scheduler.corner(work_tile.number), plan.columns // self.epilogue.unit
        rank, ctas = kb.special("cluster_ctarank"), kb.special("cluster_nctarank")
        for number in range(splits):
            columns = range(*(units * r // splits * self.epilogue.unit for r in (number, number + 1)))
            if not columns: continue
            with kb.if_(rank == number), kb.comment(f"columns {columns.start} to {columns.stop - 1}"):
                # a count that ptxas does not know: it would unroll the loop, and spill
                with kb.loop(1, ctas) as step:
                    self.add("shared::cluster", kb.mapa(own, (rank + step) % splits), sums, columns)
                self.epilogue.store(corner, self.main_loop.consumer, sums, columns)


class StreamKReduction(TileReduction):
    """CTAs of the grid, by way of the workspace."""

    def __init__(self, main_loop: MainLoop, scheduler: PersistentTileScheduler, epilogue: WgmmaEpilogue,
                 shared: Sequence[Value]) -> None:
        super().__init__(main_loop, scheduler, epilogue)
        self.workspace, self.flag = shared
        self.warps = self.plan.threads // 32
        self.workspace_bytes, self.flags = scheduler.ctas * self.plan.tile_bytes, scheduler.ctas * self.warps

    def finalize(self, work_tile: WorkTile, sums: Sums) -> None:
        """Leaves the sums of another's tile; stores its own, with what others have left."""
        end = self.kb.reg("u32", work_tile.first) + work_tile.count
        with self.kb.if_(end < self.plan.iterations): self.leave(sums)
        with self.kb.else_():
            self.gather(work_tile, sums)
            super().finalize(work_tile, sums)

    def slot(self, cta: Value) -> Value:
        """Returns the thread's place in the slot of a CTA."""
        return self.workspace + cta.to("u64") * self.plan.tile_bytes + (self.kb.tid.x * 16).to("u64")

    def flag_of(self, cta: Value) -> Value:
        """The flag of this warp in a CTA."""
        return self.flag + ((cta * self.warps + (self.kb.tid.x >> 5)) * 4).to("u64")

    def leave(self, sums: Sums) -> None:
        """Sums to the slot of this CTA; then each warp says so."""
        kb = self.kb
        slot = self.slot(kb.ctaid.x)
        for at, four in self.fours(sums): kb.st("global", self.kind, slot.at(at), four)
        kb.emit("bar.warp.sync", -1)
        kb.emit("st.release.gpu.global.u32", self.flag_of(kb.ctaid.x).at(), 1,
                guard=kb.special("laneid") == 0)

    def gather(self, work_tile: WorkTile, sums: Sums) -> None:
        """Adds what the same CTAs of the clusters before this one have of the tile, from the next one
        down."""
        kb = self.kb
        first, other = work_tile.number * self.plan.iterations, kb.reg("u32", kb.ctaid.x)
        size = self.plan.cluster
        with kb.while_(lambda: self.scheduler.stage_of(other // size) > first):
            other -= size
            flag, ready = self.flag_of(other), kb.reg("u32", 0)
            with kb.while_(lambda: ready == 0): kb.emit("ld.acquire.gpu.global.u32", ready, flag.at())
            self.add("global", self.slot(other), sums)
