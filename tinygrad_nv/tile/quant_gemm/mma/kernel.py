"""Matmuls with a quantised matrix by mma.sync: that of gemm/mma/kernel.py, whose operand B comes from codes.

A stage has a tile of activations, and codes and factors of the matrix. A warp reads its codes once for all
its rows, 16 bytes a lane, and makes operands of them between the mmas of the step before. Elements are
rounded to 16 bits once they are multiplied with their scale, those of whole rows, too.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.fragments import Fragments
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TailFirst, width_of
from tinygrad_nv.tile.quant_gemm.mma.plan import QuantMmaPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantMma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, StageOperands
from tinygrad_nv.tile.template import GPU

CHUNK = 16
OPERAND_B = (0, 2, 1, 3)    # registers of operand A in the order of two operands B


def quant_mma(spec: QuantGemmSpec, schedule: QuantMma, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    kb = Kernel("quant_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return QuantMmaKernel(kb, QuantMmaPlan.of(spec, schedule)).emit_kernel()


class QuantMmaKernel(MmaKernel):
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: QuantMmaPlan) -> None:
        self.quant = plan
        super().__init__(kb, plan)

    def declare_params(self) -> Sequence[Value]:
        a = self.kb.pointer("a")
        self.pointers = {name: self.kb.pointer(name) for name in self.quant.quant.buffers}
        return a, a

    def make_copies(self, a: Value, b: Value) -> None:
        kb, spec, s, plan = self.kb, self.spec, self.schedule, self.quant
        extent = self.rows if spec.symbolic else spec.m
        residue = spec.k % s.block_k or s.block_k
        tile = TailFirst(kb, spec.a, self._place(spec.a, a), self.first_m, extent, residue,
                         width_of(spec.a, 1 if spec.symbolic else spec.m, residue), s.block_m, s.block_k, 0,
                         spec.k)
        first_k = self.splits.first_k if self.splits.first_k is not None else kb.reg("u32", 0)
        self.starts = [plan.activation_bytes + part * plan.boxes[-1].end for part in range(spec.parts)]
        self.tiles = [tile]
        first = [self.first_n // TILE + part * (spec.n // TILE) for part in range(spec.parts)]
        tiles = plan.quant.buffers["codes"].shape[0]
        self.copies = [tile, *(MatrixCopy(kb, plan, self.pointers, at, tiles, first_k, start)
                               for at, start in zip(first, self.starts, strict=True))]
        self.stage_bytes = plan.stage_bytes

    def make_fragments(self) -> None:
        tile = self.tiles[0]
        self.fragments = [
            Fragments(self.kb, tile.operand.dtype, tile.tile, tile.mn_major, False, self.row, self.warp_m,
                      self.steps, tile.start),
            *(MatrixFragments(self.kb, self.quant, self.column, start) for start in self.starts)]


@dataclass
class MatrixCopy:
    """Copies the boxes of columns from tile `first` of 16 on (u32), of the `tiles` that there are, for K from
    `first_k` on, to byte `start` of a stage; first the last columns, where these are no whole stage
    (`TailFirst`)."""
    kb: Kernel
    plan: QuantMmaPlan
    pointers: Mapping[str, Value]
    first: Value
    tiles: int
    first_k: Value
    start: int

    def __post_init__(self) -> None:
        self.tail = self.plan.spec.k % self.plan.schedule.block_k
        self.k = self.kb.reg("u32", self.plan.spec.k - self.tail if self.tail else self.first_k)

    def ask(self) -> None:
        """Has L2 fetch the first codes."""
        box = self.plan.boxes[0]
        for guard, source, _ in self._chunks(box, None):
            self.kb.emit("prefetch.global.L2", source.at(), guard=guard)

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        """Copies the next columns to the stage at a shared address, where the predicate holds."""
        for box in self.plan.boxes:
            for guard, source, place in self._chunks(box, when):
                self.kb.emit("cp.async.cg.shared.global.L2::128B", (stage + place).at(self.start + box.start),
                             source.at(), CHUNK, guard=guard)
        if first and self.tail: self.k.set(0)
        else: self.k += self.plan.schedule.block_k

    def _chunks(self, box: Box, when: Value | None) -> list[tuple[Value | None, Value, Value]]:
        """Returns the thread's chunks of a box: whether there is one, where from, and where in the box."""
        kb, threads, made = self.kb, self.plan.schedule.threads, []
        each, chunks = box.tile_bytes // CHUNK, box.nbytes // CHUNK
        shape = self.plan.quant.buffers[box.name].shape
        row_bytes = shape[1] * shape[2] * (shape[3] if len(shape) > 3 else box.size)
        along = self._bytes_before(box)
        for i in range(0, chunks, threads):
            number = kb.tid.x + i if i else kb.tid.x
            tile = self._inside(self.first + number // each)
            source = self.pointers[box.name] + (tile.to("u64") * row_bytes
                                                + (along + number % each * CHUNK).to("u64"))
            guard = when
            if i + threads > chunks: guard = number < chunks if guard is None else guard & (number < chunks)
            made.append((guard, source, number * CHUNK))
        return made

    def _inside(self, tile: Value) -> Value:
        """A tile, or the last one: columns beyond it are not stored."""
        if self.tiles * TILE % self.plan.columns == 0: return tile
        made = self.kb.reg("u32")
        self.kb.emit("min.u32", made, tile, self.tiles - 1)
        return made

    def _bytes_before(self, box: Box) -> Value:
        """Returns the bytes of a tile's row before column `k`."""
        block_k = self.plan.schedule.block_k
        if box.codes: return self.k // block_k * box.tile_bytes
        if not box.columns: return self.kb.reg("u32", 0)
        return self.k // box.columns * (TILE * box.size)


@dataclass
class MatrixFragments:
    """A warp's columns, from column `first` (u32) of the part on, of boxes at byte `start` of a stage."""
    kb: Kernel
    plan: QuantMmaPlan
    first: Value
    start: int

    def __post_init__(self) -> None:
        plan = self.plan
        self.count = plan.warp_n // TILE
        self.operands = StageOperands(self.kb, plan.type, plan.spec.a.dtype, plan.boxes, range(self.count),
                                      True)
        self.places = self.operands.places(self.kb.reg("u32", self.start), self.first // TILE)
        self.at: dict[str, Value] = {name: self.kb.reg("u32") for name in self.places}

    def registers(self) -> list[list[Value]]:
        """Registers for a step: four for each 16 columns."""
        return [self.kb.regs("b32", 4) for _ in range(self.count)]

    def move(self, stage: Value) -> None:
        """Reads from the stage at a shared address (u32) from now on."""
        for name, place in self.places.items(): self.kb.emit("add.u32", self.at[name], stage, place)

    def load(self, step: int, into: list[list[Value]]) -> None:
        """Reads a step of the stage."""
        for i, four in enumerate(into): self.load_one(i, step, four)

    def load_one(self, i: int, step: int, four: list[Value]) -> None:
        """16 columns of a step, from 16 `i` on."""
        self.operands.read(self.at, 16 * step, range(i, i + 1))
        made = self.operands.operand(i, 16 * step)
        for register, which in zip(four, OPERAND_B, strict=True): register.set(made[which])
