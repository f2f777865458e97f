"""Grouped matmuls with quantised matrices by wgmma: grouped_gemm/wgmma's kernel, in which columns of wgmma
are rows of a group, with the main loop of quant_gemm/wgmma, whose operand A is made of codes in registers.

    producer, one thread                               other warps of its warpgroup
        boxes of codes and factors of gate, of up          rows of x, where they are gathered
        (and of rows of x)

    consumers, a warpgroup each
        codes to registers, times all rows of the tile; then bias, activation, weights, rows to their places

A code is converted once for all rows of a tile.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.grouped_gemm.wgmma.kernel import GroupedKernel
from tinygrad_nv.tile.grouped_gemm.wgmma.load import GroupedLoads, W
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.quant_gemm.wgmma.kernel import QuantMainLoop, first_of
from tinygrad_nv.tile.quant_grouped.matrices import tiles
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.quant_grouped.wgmma.plan import QuantGroupedPlan
from tinygrad_nv.tile.template import GPU


def quant_grouped_wgmma(spec: QuantGroupedSpec, schedule: QuantGroupedWgmma, gpu: GPU) -> TileKernel:
    """The kernel, by a legal schedule. Pointers: out; x; the stack's buffers; offsets; order, weights, bias,
    where the spec has them."""
    kb = Kernel("quant_grouped_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return _QuantGroupedKernel(kb, QuantGroupedPlan.of(spec, schedule)).emit_kernel(gpu)


class _QuantGroupedKernel(GroupedKernel):
    plan: QuantGroupedPlan

    @property
    def matrices(self) -> Sequence[str]: return [*self.plan.stack.buffers]

    def make_loads(self) -> GroupedLoads: return _StackLoads(self.kb, self.plan)

    def make_main_loop(self) -> QuantMainLoop:
        return QuantMainLoop(self.kb, self.plan, self.ring, self.ordered, self.loads)


class _StackLoads(GroupedLoads):
    """Boxes of the matrices of a group, gate's and up's apart."""
    plan: QuantGroupedPlan

    def declare_matrices(self) -> None:
        plan, buffers = self.plan, self.plan.stack.buffers
        for pointer, box in enumerate(plan.boxes, W):
            self.maps.append(plan.map(box, buffers[box.name].shape, pointer))
            self.tensor_maps.append(self.kb.tensor_map(f"map_{box.name}"))

    def issue_matrix(self, stage: Value, full: MemoryOperand) -> None:
        kb, plan, tile = self.kb, self.plan, self.tile
        each, place = tiles(plan.stack), self.matrix_start + stage * plan.matrix_bytes
        first = tile.group * (plan.halves * each) + tile.column // TILE
        for box, tensor_map in zip(plan.boxes, self.tensor_maps, strict=False):
            inner = first_of(box, self.at_k, plan.schedule.block_k)
            for half in range(plan.halves):
                target = place.at(box.start + half * box.nbytes // plan.halves)
                kb.tma_load(target, tensor_map, [inner, (first + half * each).to("s32")], full)
