"""Matmuls with a 2:4 sparse matrix by mma.sp: that of gemm/mma/kernel.py, transposed, as operand A is the one
that may be sparse. Rows of the computed matmul are those of the matrix, columns rows of activations.

A stage has a tile of values, one of activations with twice as many columns, and the metadata of the values.
An mma.sp takes the time of an mma of half of its columns.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.fragments import Fragments
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel, Operands
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TileCopy, width_of
from tinygrad_nv.tile.sparse_gemm import spec as metadata
from tinygrad_nv.tile.sparse_gemm.mma.copy import DenseFragments, MetadataCopy, SparseFragments
from tinygrad_nv.tile.sparse_gemm.mma.plan import SparseMmaPlan
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.template import GPU


def sparse_mma(spec: SparseGemmSpec, schedule: SparseMma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    kb = Kernel("sparse_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return SparseMmaKernel(kb, SparseMmaPlan.of(spec, schedule)).emit_kernel()


class SparseMmaKernel(MmaKernel):
    """The kernel as it is written."""
    PROMOTES = False

    def __init__(self, kb: Kernel, plan: SparseMmaPlan) -> None:
        self.sparse = plan
        super().__init__(kb, plan)

    def declare_params(self) -> Sequence[Value]:
        activations, values = (self.kb.pointer(name) for name in ("a", "values"))
        self.pointer = self.kb.pointer("metadata")
        return values, activations

    def make_copies(self, a: Value, b: Value) -> None:
        kb, plan, spec, s = self.kb, self.sparse, self.spec, self.schedule
        first_k = self.splits.first_k
        sides = ((plan.sparse.values, a, 2, self.first_m, spec.m, s.block_m, 0),
                 (spec.b, b, 1, self.first_n, spec.n, s.block_n, plan.value_bytes))
        self.tiles = []
        for operand, pointer, share, first, extent, block, start in sides:
            block_k = s.block_k // share
            k = None if first_k is None else first_k // share
            self.tiles.append(TileCopy(kb, operand, self._begin(operand, pointer, k), first, extent, block_k,
                                       width_of(operand, extent, block_k), block, block_k, start))
        self.copies = [*self.tiles, MetadataCopy(kb, plan, self.pointer, self.first_m // TILE, first_k)]
        self.stage_bytes = plan.stage_bytes

    def _begin(self, operand: Operand, pointer: Value, first_k: Value | None) -> Value:
        """Returns the address at which an operand begins, at its first element of K."""
        at = self.kb.reg("u64", operand.offset)
        if first_k is not None: at = at + first_k.to("u64") * operand.k
        return pointer + at * operand.dtype.itemsize

    def make_fragments(self) -> None:
        kb, (a, b) = self.kb, self.tiles
        values = Fragments(kb, a.operand.dtype, a.tile, a.mn_major, False, self.row, self.warp_m, self.steps,
                           a.start)
        self.fragments = [SparseFragments(kb, self.sparse, values, self.row),
                          DenseFragments(kb, b, self.column, self.warp_n, self.steps)]

    def _multiply_step(self, operands: Operands, step: int, after: Operands | None = None) -> None:
        plan, (rows, columns), (values, activations) = self.sparse, operands, self.fragments
        selector, following = step % metadata.steps_of_unit(plan.size), (step + 1) % self.steps
        if after: activations.load(following, after[1])
        for i, left in enumerate(rows):
            for right, cell in zip(columns, self.sums[0][i], strict=True):
                self.kb.emit(plan.instruction, cell, left[:4], right, cell, left[4], selector)
            if after: values.load_one(i, following, after[0][i])
