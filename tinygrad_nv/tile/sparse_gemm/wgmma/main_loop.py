"""The consumers' main loop: wgmma.sp of 64 columns at a time, whose metadata a warp reads from the stage.

    for each stage: wait for it
        for each unit of 64 columns: read its metadata, a word for each 64 rows
            its wgmmas; wait for those `pending` before; give back the stage before, once it is read

A unit is a group with a fence and a wait of its own: metadata is a register of a wgmma, which ptxas takes
only where it was written after the last wait (C7513). Fp8 waits for each 256 columns, 128 values, whose
sums go to float32, as those of dense matmuls do.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
from tinygrad_nv.tile.sparse_gemm import metadata
from tinygrad_nv.tile.sparse_gemm.metadata import UNIT_WORDS
from tinygrad_nv.tile.sparse_gemm.wgmma.load import SparseLoads
from tinygrad_nv.tile.sparse_gemm.wgmma.plan import SparseWgmmaPlan


class SparseMainLoop(MainLoop):
    """The main loop of one consumer warpgroup."""

    def __init__(self, kb: Kernel, plan: SparseWgmmaPlan, ring: Pipeline, ordered: OrderedBarrier | None,
                 loads: SparseLoads) -> None:
        super().__init__(kb, plan, ring, ordered, loads)
        self.sparse, self.start = plan, loads.metadata

    def begin(self) -> None:
        """Computes where a warp's tiles of metadata are in a stage."""
        super().begin()
        kb, plan = self.kb, self.sparse
        warp = kb.tid.x % WARPGROUP >> 5
        tile = warp if plan.readers == 1 else self.consumer * (plan.rows // 16) + warp
        self.tile_bytes = metadata.row_bytes(plan.schedule.block_k)
        self.place = self.start + tile * self.tile_bytes + kb.special("laneid") * 4
        self.words = [kb.regs("b32", plan.units) for _ in range(plan.subtiles)]

    def _accumulate(self, iterations: Number) -> None:
        """The first stage apart: it adds to nothing, and none is given back."""
        kb = self.kb
        self._multiply_stage(False)
        with kb.loop(1, iterations, kind="u32"): self._multiply_stage(True)
        self._arrive_issued()
        kb.wgmma_wait(0)
        if self.sparse.pending: self.ring.release(self.empty_barriers, self.last, self.mine)

    def _multiply_stage(self, further: bool) -> None:
        """wgmmas of the next stage; gives back the one before, if there is one; of one unit its own."""
        kb, each, pending = self.kb, self.sparse.unit_steps, self.sparse.pending
        self.ring.wait(self.at)
        for unit in range(self.sparse.units):
            self._read(unit)
            kb.wgmma_fence()
            self._stage(dict(enumerate(self.sums)), further or unit > 0, unit * each, (unit + 1) * each)
            kb.wgmma_commit()
            kb.wgmma_wait(pending)
            if further and unit == pending - 1: self.ring.release(self.empty_barriers, self.last, self.mine)
        if not pending: self.ring.release(self.empty_barriers, self.at.stage, self.mine)
        self._next()

    def _arrive(self) -> None:
        """Fp8: wgmmas of the stages before have ended, and metadata of all units is read."""
        super()._arrive()
        for unit in range(self.sparse.units): self._read(unit)

    def _read(self, unit: int) -> None:
        """Metadata of a unit of the stage."""
        place = self.place + self.at.stage * self.sparse.metadata_bytes
        for i, words in enumerate(self.words):
            nbytes = 4 * i * self.tile_bytes + unit * UNIT_WORDS * 4
            self.kb.emit("ld.shared.b32", words[unit], place.at(nbytes))

    def _stage(self, rows: Mapping[int, Sequence[Value]], further: bool, first: int, end: int) -> None:
        kb, plan = self.kb, self.sparse
        a, b = self.a.stage(self.at.stage), self.b.stage(self.at.stage)
        tail: list[int] = []
        if self.kind != "s32": tail += [1, 1]
        if plan.a.size == 2: tail += [0, int(plan.b.major == "MN")]
        for step in range(first, end):
            right, (unit, selector) = self.b.at(b, plan.b.at_step(2 * step)), divmod(step, plan.unit_steps)
            for i, row in rows.items():
                left = self.a.at(a, plan.a.at_mn(64 * i) + plan.a.at_step(step))
                kb.emit(f"wgmma.mma_async.sp.sync.aligned.{plan.shape}.{plan.types}", list(row), left, right,
                        self.words[i][unit], selector, int(further or step > first), *tail)
