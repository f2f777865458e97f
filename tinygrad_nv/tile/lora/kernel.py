"""h Bᵀ of rows that have an adapter each, with mma.sync (spec.py): a grouped matmul (grouped_gemm/mma) whose
tiles of columns lie in a segment each. For sm_80 and later.

    the adapter and the rows of this CTA, from the offsets; rows without an adapter are the last group
    rows of h are read from the columns of the segment on
    each row to its place; 0 without an adapter

Rows without an adapter multiply the first adapter's B, and the result is not used: whatever that holds.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.grouped_gemm.epilogue import GroupedEpilogue
from tinygrad_nv.tile.grouped_gemm.mma.kernel import GroupedMmaKernel
from tinygrad_nv.tile.grouped_gemm.work import Tile
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.lora.spec import LoraExpandSpec
from tinygrad_nv.tile.lora.templates import LoraExpandMma, whole
from tinygrad_nv.tile.template import GPU


def lora_expand_mma(spec: LoraExpandSpec, schedule: LoraExpandMma, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; h; b; ranks, which are not read; offsets; order."""
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return _LoraExpandKernel(kb, MmaPlan.of(whole(spec, schedule), schedule.mma), spec).emit_kernel()


class _Epilogue(GroupedEpilogue):
    """0 for rows without an adapter."""
    alone: Value

    def value(self, sums: Sequence[Value], bias: Sequence[Value], weight: Value | None) -> Value:
        return self.kb.select(self.alone, 0.0, super().value(sums, bias, weight))


class _LoraExpandKernel(GroupedMmaKernel):
    """A grouped matmul's kernel whose rows of x are cut into segments."""
    finish: _Epilogue

    def __init__(self, kb: Kernel, plan: MmaPlan, lora: LoraExpandSpec) -> None:
        self.lora = lora
        super().__init__(kb, plan, lora.grouped_gemm)

    def declare_params(self) -> tuple[Value, Value]:
        self.finish = _Epilogue(self.kb, self.grouped, ("b", "ranks"))
        return self.finish.x, self.finish.matrices["b"]

    def rows_read(self) -> Tile:
        """None where there is no adapter: h was not written there."""
        self.finish.alone = self.tile.group == self.lora.adapters
        return replace(self.tile, rows=self.kb.select(self.finish.alone, 0, self.tile.rows, "u32"))

    def matrix(self, w: Value) -> Value:
        """The adapter's B; the first one's of rows without an adapter."""
        kb, spec = self.kb, self.lora
        group = kb.select(self.finish.alone, 0, self.tile.group, "u32")
        return advance(kb, w, group, spec.rank * spec.columns * spec.dtype.itemsize)

    def x_of(self, x: Value) -> Value:
        """From the columns of this CTA's segment on."""
        kb, spec = self.kb, self.lora
        segment = kb.reg("u32", 0)
        for first, _ in spec.spans[1:]: segment = segment + kb.select(self.first_n < first, 0, 1, "u32")
        return advance(kb, x, segment, spec.rank * spec.dtype.itemsize)
