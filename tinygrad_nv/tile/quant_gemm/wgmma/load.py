"""The producer's copies: boxes of codes and factors, and of activations."""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner
from tinygrad_nv.tile.quant_gemm.stages import Box
from tinygrad_nv.tile.quant_gemm.wgmma.plan import QuantWgmmaPlan


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
