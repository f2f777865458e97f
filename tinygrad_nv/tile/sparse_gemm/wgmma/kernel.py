"""Matmuls with a 2:4 sparse matrix by wgmma.sp: that of gemm/wgmma/kernel.py, transposed, as operand A is the
one that may be sparse. Rows of the computed matmul are those of the matrix, columns rows of activations.

    producer, one thread                           consumers, a warpgroup each
        values, activations, metadata                  metadata to registers, wgmma.sp

A wgmma.sp takes the time of a wgmma of half of its columns.

The consumers' main loop: wgmma.sp of 64 columns at a time, whose metadata a warp reads from the stage.

    for each stage: wait for it
        for each unit of 64 columns: read its metadata, a word for each 64 rows
            its wgmmas; wait for those `pending` before; give back the stage before, once it is read

A unit is a group with a fence and a wait of its own: metadata is a register of a wgmma, which ptxas takes
only where it was written after the last wait (C7513). Fp8 waits for each 256 columns, 128 values, whose
sums go to float32, as those of dense matmuls do.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads
from tinygrad_nv.tile.gemm.wgmma.main_loop import MainLoop
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
from tinygrad_nv.tile.sparse_gemm.schedules import SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import UNIT_WORDS, SparseGemmSpec, metadata_row_bytes
from tinygrad_nv.tile.sparse_gemm.wgmma.plan import SparseWgmmaPlan
from tinygrad_nv.tile.template import GPU


def sparse_wgmma(spec: SparseGemmSpec, schedule: SparseWgmma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    plan = SparseWgmmaPlan.of(spec, schedule)
    ctas = plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, gpu.clusters)
    kb = Kernel("sparse_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1,
               cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else ())
    return SparseWgmmaKernel(kb, plan, ctas).emit_kernel()


class SparseWgmmaKernel(WgmmaKernel):
    """The kernel as it is written."""
    OPERANDS = ("a", "values", "metadata")

    def __init__(self, kb: Kernel, plan: SparseWgmmaPlan, ctas: int) -> None:
        self.sparse = plan
        super().__init__(kb, plan, ctas)

    def make_loads(self, first_pointer: int) -> SparseLoads:
        self.copies = SparseLoads(self.kb, self.sparse)
        return self.copies

    def make_main_loop(self, pointers: Mapping[str, Value], rows: Value | int) -> SparseMainLoop:
        return SparseMainLoop(self.kb, self.sparse, self.ring, self.ordered, self.copies)


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
        self.tile_bytes = metadata_row_bytes(plan.schedule.block_k)
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


class SparseLoads(GemmLoads):
    """Copies of a stage. Of the kernel's pointers activations are number 1, values 2, metadata 3."""

    def __init__(self, kb: Kernel, plan: SparseWgmmaPlan) -> None:
        self.kb, self.plan, self.sparse = kb, plan, plan
        self.maps = []
        spec, s = plan.spec, plan.schedule
        a_bytes, b_bytes = (-(-tile.nbytes * s.depth // 1024) * 1024 for tile in (plan.a, plan.b))
        self.ring = kb.shared("ring", a_bytes + b_bytes + plan.metadata_bytes * s.depth, align=1024)
        self.a = self._side("a", 0, plan.sparse.values, plan.a, 2, spec.m, plan.a_rows, s.cluster_n,
                            k=spec.k // 2)
        self.b = self._side("b", a_bytes, spec.b, plan.b, 1, spec.n, plan.b_rows, s.cluster_m)
        self.maps.append(plan.metadata_map)
        self.metadata_map = kb.tensor_map("map_metadata")
        self.metadata = self.ring.address(a_bytes + b_bytes)
        self.tile, self.word = kb.reg("s32"), kb.reg("s32")

    @property
    def tensor_maps(self) -> list[Value]: return [*super().tensor_maps, self.metadata_map]

    def begin(self, corner: Corner, first: Value | int = 0) -> None:
        super().begin(corner, first)
        self.kb.emit("mov.b32", self.tile, corner.m // TILE)
        self.kb.emit("mov.b32", self.word, first * (self.sparse.units * UNIT_WORDS))

    def issue(self, stage: Value, full: MemoryOperand) -> None:
        super().issue(stage, full)
        place = self.metadata + stage * self.sparse.metadata_bytes
        self.kb.tma_load(place.at(), self.metadata_map, [self.word, self.tile], full)
        self.word += self.sparse.units * UNIT_WORDS
