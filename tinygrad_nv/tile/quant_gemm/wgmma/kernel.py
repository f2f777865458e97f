"""Matmuls with a quantised matrix by wgmma: that of gemm/wgmma/kernel.py, transposed, whose operand A comes
from codes. Rows of the computed matmul are those of the matrix, columns are rows of activations.

    producer, one thread                       consumers, a warpgroup each
        codes, factors, activations                codes to registers, times activations

Operand A is in registers: elements take no shared memory, and no second way through it. As Machete (vLLM)
does it.

The consumers' main loop: codes to operands in registers, 16 columns at a time, while wgmmas of columns
before are in flight.

    for each stage: wait for it, read its codes
        for each 16 columns: codes to operands, times their scales
            wgmmas of these columns: registers times activations; wait for those `PENDING` before
            give back the stage before, once its last wgmmas are done

Each 16 columns are a group of wgmmas with a fence and a wait of its own: ptxas 13 takes registers of a wgmma
only where they were written after the last wait, else it waits for every wgmma (C7513).

A warp has the codes of its 16 rows of each 64: 16 bytes a lane for 64 columns of 4 bits. Elements are rounded
to 16 bits once they are multiplied with their scale, as the reference rounds them, where scales are of that
dtype; other scales are rounded to it first. Scales of whole rows are multiplied with the sums.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors, MainLoop, OperandStages
from tinygrad_nv.tile.gemm.wgmma.plan import WARPGROUP
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
from tinygrad_nv.tile.quant_gemm.factors import Pair
from tinygrad_nv.tile.quant_gemm.schedules import QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, StageOperands
from tinygrad_nv.tile.quant_gemm.wgmma.plan import PENDING, MatrixStages, QuantWgmmaPlan
from tinygrad_nv.tile.template import GPU


def quant_wgmma(spec: QuantGemmSpec, schedule: QuantWgmma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    plan = QuantWgmmaPlan.of(spec, schedule)
    ctas = plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, gpu.clusters)
    kb = Kernel("quant_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1,
               cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else ())
    return QuantWgmmaKernel(kb, plan, ctas).emit_kernel()


class QuantWgmmaKernel(WgmmaKernel):
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: QuantWgmmaPlan, ctas: int) -> None:
        self.quant, self.OPERANDS = plan, ("a", *plan.quant.buffers)
        super().__init__(kb, plan, ctas)

    def make_loads(self, first_pointer: int) -> QuantLoads:
        self.copies = QuantLoads(self.kb, self.quant, first_pointer)
        return self.copies

    def make_main_loop(self, pointers: Mapping[str, Value], rows: Value | int) -> QuantMainLoop:
        return QuantMainLoop(self.kb, self.quant, self.ring, self.ordered, self.copies)


class QuantLoads(GemmLoads):
    """Copies of a stage. `first_pointer` is the number of the activations' among the kernel's pointers; those
    of the matrix's buffers follow."""

    def __init__(self, kb: Kernel, plan: QuantWgmmaPlan, first_pointer: int) -> None:
        self.kb, self.plan, self.quant = kb, plan, plan
        self.maps = []
        spec, s = plan.spec, plan.schedule
        self.ring = kb.shared("ring", plan.ring_bytes, align=1024)
        self.start = self.ring.address()
        self.boxes: list[tuple[Box, Value]] = []
        for number, box in enumerate(plan.boxes):
            shape = plan.quant.buffers[box.name].shape
            self.maps.append(plan.map(box, shape, first_pointer + 1 + number))
            self.boxes.append((box, kb.tensor_map(f"map_{box.name}")))
        self.b = self._side("b", plan.b_start, spec.b, plan.b, first_pointer, spec.n, plan.b_rows,
                            s.cluster_m)
        self.tile, self.k = kb.reg("s32"), kb.reg("s32")

    @property
    def tensor_maps(self) -> list[Value]: return [*(each for _, each in self.boxes), *self.b.maps]

    @property
    def starts(self) -> tuple[Value, Value]: return self.start, self.b.ring

    def begin(self, corner: Corner, first: Value | int = 0) -> None:
        kb, start = self.kb, first * self.plan.schedule.block_k
        kb.emit("mov.b32", self.tile, corner.m // TILE)
        kb.emit("mov.b32", self.b.mn, corner.n)
        for each in (self.k, self.b.at_k): kb.emit("mov.b32", each, start)
        self.b.batch = []

    def issue(self, stage: Value, full: MemoryOperand) -> None:
        kb, plan = self.kb, self.quant
        place = self.start + stage * plan.matrix_bytes
        for box, tensor_map in self.boxes:
            first = first_of(box, self.k, plan.schedule.block_k)
            kb.tma_load(place.at(box.start), tensor_map, [first, self.tile], full)
        self.copy_boxes(self.b, 0, self.b.maps[0], self.b.target + stage * plan.b.nbytes, full)
        for each in (self.k, self.b.at_k): each += plan.schedule.block_k


def first_of(box: Box, k: Value, block_k: int) -> Value | int:
    """The first element of a row of tiles that a stage has, whose first column is `k`."""
    if box.codes:
        if box.inner >= block_k: return k * (box.inner // block_k)
        return k // (block_k // box.inner)
    return k // box.columns * TILE if box.columns else 0


class QuantMainLoop(MainLoop):
    """The main loop of one consumer warpgroup."""

    def __init__(self, kb: Kernel, plan: MatrixStages, ring: Pipeline, ordered: OrderedBarrier | None,
                 loads: OperandStages) -> None:
        super().__init__(kb, plan, ring, ordered, loads)
        self.quant = plan

    def begin(self) -> None:
        """Registers of the consumer; where its warp's tiles are in a stage."""
        kb, plan = self.kb, self.quant
        self.at, self.last = self.ring.cursor(), kb.reg("u32", 0)
        self.consumer = kb.reg("u32")
        kb.emit("redux.sync.min.u32", self.consumer, kb.tid.x // WARPGROUP, -1)
        start, activations = self.loads.starts
        self.b = Descriptors.of(kb, plan.b, activations)
        lane = kb.special("laneid")
        self.mine = lane < plan.peers
        self.empty_barriers = self.ring.empty_barriers()
        if self.ordered is not None:
            self.ordered.begin(self.consumer, lane == 0)
            self.at.jump(self.consumer * plan.iterations)
        self.sums = [kb.regs(self.kind, plan.schedule.block_n // 2) for _ in range(plan.subtiles)]
        self.operands = StageOperands(kb, plan.type, plan.spec.a.dtype, plan.boxes, plan.warp_tiles,
                                      plan.has_row_scales)
        warp = kb.tid.x % WARPGROUP >> 5
        tile = self.consumer * plan.tiles_apart + warp if plan.tiles_apart else warp
        self.places = self.operands.places(start, tile)

    # **** the loop ****

    def _accumulate(self, iterations: Number) -> None:
        """The first stage apart: it adds to nothing, and none is given back."""
        kb = self.kb
        self._multiply_stage(False)
        with kb.loop(1, iterations, kind="u32"): self._multiply_stage(True)
        self._arrive_issued()
        if not self.quant.has_row_scales: scales = self._row_scales()
        kb.wgmma_wait(0)
        self.ring.release(self.empty_barriers, self.last, self.mine)
        if self.quant.has_row_scales: return
        for row, pair in zip(self.sums, scales, strict=True):
            for i, total in enumerate(row): kb.emit("mul.f32", total, total, pair[i >> 1 & 1])

    def _multiply_stage(self, further: bool) -> None:
        """Operands and wgmmas of the next stage; gives back the one before, if there is one."""
        kb, plan = self.kb, self.quant
        self.ring.wait(self.at)
        b, at = self.b.stage(self.at.stage), self._at_stage(self.at.stage)
        for step in range(plan.steps):
            self.operands.read(at, 16 * step)
            operands = [self.operands.operand(i, 16 * step) for i in range(plan.subtiles)]
            right = self.b.at(b, plan.b.at_step(step))
            kb.wgmma_fence()
            for row, four in zip(self.sums, operands, strict=True):
                kb.wgmma(plan.shape, plan.types, row, four, right, further or step > 0,
                         trans=(False, plan.b.major == "MN"))
            kb.wgmma_commit()
            kb.wgmma_wait(PENDING)
            if further and step == PENDING - 1: self.ring.release(self.empty_barriers, self.last, self.mine)
        self._next()

    def _at_stage(self, stage: Value) -> dict[str, Value]:
        """Returns the lane's places in a stage."""
        offset = stage * self.quant.matrix_bytes
        return {name: place + offset for name, place in self.places.items()}

    def _row_scales(self) -> list[Pair]:
        """Returns the scales of the rows of each 64, of the stage before."""
        at = self._at_stage(self.last)
        made = self.operands
        return [made.factors.scales(made.load_blocks(at, i, 0)) for i in range(self.quant.subtiles)]
