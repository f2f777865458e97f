"""Matmuls with a 2:4 sparse matrix by mma.sp: that of gemm/mma/kernel.py, transposed, as operand A is the one
that may be sparse. Rows of the computed matmul are those of the matrix, columns rows of activations.

A stage has a tile of values, one of activations with twice as many columns, and the metadata of the values.
An mma.sp takes the time of an mma of half of its columns.

Metadata by cp.async to shared memory; values with their metadata, and activations, as operands of
mma.sp.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.fragments import STEP_BYTES, Fragments
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel, Operands
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import Places, TileCopy, swizzle_offset, width_of
from tinygrad_nv.tile.sparse_gemm.mma.plan import SparseMmaPlan
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma
from tinygrad_nv.tile.sparse_gemm.spec import (
    UNIT_WORDS,
    SparseGemmSpec,
    metadata_bytes,
    metadata_row_bytes,
    steps_of_unit,
)
from tinygrad_nv.tile.template import GPU

CHUNK = 16      # bytes a thread copies


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
        selector, following = step % steps_of_unit(plan.size), (step + 1) % self.steps
        if after: activations.load(following, after[1])
        for i, left in enumerate(rows):
            for right, cell in zip(columns, self.sums[0][i], strict=True):
                self.kb.emit(plan.instruction, cell, left[:4], right, cell, left[4], selector)
            if after: values.load_one(i, following, after[0][i])


@dataclass
class MetadataCopy:
    """Copies metadata of the tiles of 16 rows from tile `first` on (u32), for columns from `first_k` on."""
    kb: Kernel
    plan: SparseMmaPlan
    pointer: Value
    first: Value
    first_k: Value | None

    def __post_init__(self) -> None:
        kb, plan, s = self.kb, self.plan, self.plan.schedule
        self.row_bytes = metadata_row_bytes(s.block_k)
        tiles, units, lanes = plan.sparse.buffers["metadata"].shape
        self.chunks: list[tuple[Value | None, Value, Value]] = []
        count, each = metadata_bytes(s.block_m, s.block_k) // CHUNK, self.row_bytes // CHUNK
        threads = s.threads
        for i in range(0, count, threads):
            number = kb.tid.x + i if i else kb.tid.x
            tile, inside = self.first + number // each, kb.reg("u32")
            kb.emit("min.u32", inside, tile, tiles - 1)     # rows beyond the last are not stored
            before = number % each * CHUNK
            if self.first_k is not None: before = before + self.first_k // s.block_k * self.row_bytes
            source = self.pointer + (inside.to("u64") * (units * lanes * 4) + before.to("u64"))
            guard = None if i + threads <= count else number < count
            self.chunks.append((guard, source, number * CHUNK + plan.metadata_start))

    def ask(self) -> None:
        """Has L2 fetch the first ones."""
        for guard, source, _ in self.chunks: self.kb.emit("prefetch.global.L2", source.at(), guard=guard)

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        """Copies the next columns' to the stage at a shared address, where the predicate holds."""
        for mine, source, place in self.chunks:
            guard = mine if when is None else when if mine is None else mine & when
            self.kb.emit("cp.async.cg.shared.global.L2::128B", (stage + place).at(), source.at(), CHUNK,
                         guard=guard)
            source += self.row_bytes


@dataclass
class SparseFragments:
    """A warp's rows of values and their metadata, from row `first` (u32) of the tile on: five registers for
    each 16 rows."""
    kb: Kernel
    plan: SparseMmaPlan
    values: Fragments
    first: Value

    def __post_init__(self) -> None:
        self.row_bytes = metadata_row_bytes(self.plan.schedule.block_k)
        lane = self.kb.special("laneid")
        self.place = self.first // TILE * self.row_bytes + lane * 4 + self.plan.metadata_start
        self.at = self.kb.reg("u32")

    def registers(self) -> list[list[Value]]:
        """Registers for a step."""
        return [[*four, self.kb.reg("b32")] for four in self.values.registers()]

    def move(self, stage: Value) -> None:
        """Reads from the stage at a shared address (u32) from now on."""
        self.values.move(stage)
        self.kb.emit("add.u32", self.at, stage, self.place)

    def load(self, step: int, into: list[list[Value]]) -> None:
        """Reads a step of the stage."""
        for i, five in enumerate(into): self.load_one(i, step, five)

    def load_one(self, i: int, step: int, five: list[Value]) -> None:
        """Reads 16 rows of a step, from 16 `i` on."""
        self.values.load_one(i, step, five[:4])
        unit = step // steps_of_unit(self.plan.size)
        word = i * self.row_bytes + unit * UNIT_WORDS * 4
        self.kb.emit("ld.shared.b32", five[4], self.at.at(word))


@dataclass
class DenseFragments:
    """A warp's `extent` columns of the activations, from column `first` (u32) of a tile on: of each 8 columns
    four registers, 8, 16 or 32 of K, in the order in which one ldmatrix reads them. Two dense operands of
    `Fragments` would have to be moved to lie side by side."""
    kb: Kernel
    copy: TileCopy
    first: Value
    extent: int
    steps: int

    def __post_init__(self) -> None:
        lane, tile, size = self.kb.special("laneid"), self.copy.tile, self.copy.size
        low, chunk = lane & 7, lane >> 3
        if self.copy.mn_major: place = swizzle_offset(tile, low + chunk * 8, self.first * size)
        else: place = swizzle_offset(tile, self.first + low, chunk * 16)
        self.places = Places(self.kb, tile, place)
        self.places.prepare([self._plain(i, step) for i in range(self.extent // 8)
                             for step in range(self.steps)])

    def registers(self) -> list[list[Value]]:
        """Registers for a step."""
        return [self.kb.regs("b32", 4) for _ in range(0, self.extent, 8)]

    def move(self, stage: Value) -> None:
        """Reads from the stage at a shared address (u32) from now on."""
        self.places.at_stage(stage)

    def load(self, step: int, into: list[list[Value]]) -> None:
        """Reads a step of the stage."""
        for i, four in enumerate(into): self.load_one(i, step, four)

    def load_one(self, i: int, step: int, four: list[Value]) -> None:
        """Reads 8 columns of a step, from 8 `i` on."""
        trans = ".trans" if self.copy.mn_major else ""
        self.kb.emit(f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16", four,
                     self.places(self._plain(i, step), self.copy.start))

    def _plain(self, i: int, step: int) -> int:
        if not self.copy.mn_major: return self.copy.tile.plain(8 * i, step * 2 * STEP_BYTES)
        return self.copy.tile.plain(step * 2 * STEP_BYTES // self.copy.size, 8 * i * self.copy.size)
