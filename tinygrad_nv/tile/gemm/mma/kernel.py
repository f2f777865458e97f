"""Matmuls with mma.sync: a ring of cp.async stages, fragments by ldmatrix. For sm_80 and later, and
for any extents, strides and alignment.

    the first `depth - 1` tiles along K are on their way; fragments of the first step are read
    for each tile along K:
        start the copies of the tile `depth - 1` further on, into the place of the tile before
        for each step of 32 bytes:
            at the last: wait until the next tile is in and all warps have read the last of this one
            read the fragments of the step after, of the next tile if need be
            all products of the warp's tile; of 8-bit floats on sm_89, after 128 of K: promote their sums
    with splits: leave the sums in the workspace; the CTA that comes last adds them all up
    the epilogue; store what lies inside

CTAs walk the tiles of the result in groups of rows, so that those at work together share operands in L2.

On Hopper it is launched early: all threads wait for the kernel before ahead of their first copies, and the
kernel after may begin when all CTAs have come to the end of their sums. Before they wait they have L2 fetch
what they copy first: a hint, which reads nothing, and without which ptxas leaves all arithmetic for later.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.fragments import Fragments, instruction
from tinygrad_nv.tile.gemm.mma.plan import PROMOTED_STEPS, MmaPlan, needs_promotion
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.gemm.splits import Splits
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TileCopy, width_of
from tinygrad_nv.tile.result_store import Store
from tinygrad_nv.tile.store_plan import Cell
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.tile_scheduler import TileScheduler

REGISTERS = 210  # sums and fragments that leave room for addresses among 255

Sums = list[list[list[Value]]]      # by 16 rows, by 8 columns: four registers
Operands = list[list[list[Value]]]  # of A and each part of B, by 16 rows or columns: four registers


class StageCopy(Protocol):
    """Brings its share of a stage (tile/ops.py)."""

    def ask(self) -> None: ...
    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None: ...


class StageFragments(Protocol):
    """A warp's share of an operand (tile/fragments.py)."""

    def registers(self) -> list[list[Value]]: ...
    def move(self, stage: Value) -> None: ...
    def load(self, step: int, into: list[list[Value]]) -> None: ...
    def load_one(self, i: int, step: int, four: list[Value]) -> None: ...


def gemm_mma(spec: GemmSpec, schedule: Mma, gpu: GPU) -> GemmKernel:
    """The kernel of a matmul, by a legal schedule."""
    # min_ctas: else ptxas spills a word here and there for one CTA more on a multiprocessor
    kb = Kernel("gemm_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return MmaKernel(kb, MmaPlan.of(spec, schedule)).emit_kernel()


class MmaKernel:
    """The kernel as it is written: the parameters, then the stages of the protocol above. PROMOTES: whether
    sums of 8-bit floats go to float32 where tensor cores cut them; without, sums over K lose bits there."""
    PROMOTES = True
    copies: Sequence[StageCopy]
    fragments: Sequence[StageFragments]
    stage_bytes: int

    def __init__(self, kb: Kernel, plan: MmaPlan) -> None:
        self.kb, self.plan, self.spec, self.schedule = kb, plan, plan.spec, plan.schedule
        spec, s = plan.spec, plan.schedule
        self.columns, self.steps = plan.columns, plan.steps
        self.warp_m, self.warp_n = plan.warp_m, plan.warp_n
        self.promoted = self.PROMOTES and needs_promotion(spec.a.dtype, kb.arch)
        self.splits = Splits(kb, spec, s, self.warp_m // 16 * self.warp_n // 8 * spec.parts)
        self.out = kb.pointer("out")
        self.splits.declare()
        pointers = self.declare_params()
        self.extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.rows: Value | int = kb.param("m", "u32") if spec.symbolic else spec.m
        self.scheduler = TileScheduler(kb, spec, s, self.rows)
        self.splits.begin(self.scheduler)
        self.first_m, self.first_n = self.scheduler.m * s.block_m, self.scheduler.n * self.columns
        self.make_copies(*pointers)
        warp = kb.tid.x >> 5
        self.row, self.column = warp % s.warps_m * self.warp_m, warp // s.warps_m * self.warp_n
        self.make_fragments()

    def batch_offset(self, strides: tuple[int, ...], offset: int) -> Value:
        """Elements before this CTA's matrix: u64."""
        at = self.kb.reg("u64", offset)
        for index, stride in zip(self.scheduler.batch, strides, strict=True):
            if stride: at = at + index.to("u64") * stride
        return at

    def declare_params(self) -> Sequence[Value]:
        """The operands' pointers."""
        a, b = (self.kb.pointer(name) for name in "ab")
        return (b, a) if self.schedule.swap else (a, b)

    def make_fragments(self) -> None:
        """The fragments of A, and of each part of B."""
        self.fragments = [
            Fragments(self.kb, copy.operand.dtype, copy.tile, copy.mn_major, i > 0,
                      self.column if i else self.row, self.warp_n if i else self.warp_m, self.steps,
                      copy.start)
            for i, copy in enumerate(self.tiles)]

    def make_copies(self, a: Value, b: Value) -> None:
        """The copies of A, then of each part of B, which follow each other in a stage."""
        kb, spec, s = self.kb, self.spec, self.schedule
        made: list[TileCopy] = []
        residue = spec.k % s.block_k or s.block_k
        parts = [replace(spec.b, offset=spec.b.offset + part * spec.part) for part in range(spec.parts)]
        start = 0
        for operand, pointer, first, extent, block in (
                (spec.a, a, self.first_m, spec.m, s.block_m),
                *((part, b, self.first_n, spec.n, self.columns) for part in parts)):
            runtime = spec.symbolic and not made
            width = width_of(operand, 1 if runtime else extent, residue)
            made.append(TileCopy(kb, operand, self._place(operand, pointer), first,
                                 self.rows if runtime else extent,
                                 self.splits.residue, width, block, s.block_k, start))
            start += made[-1].tile.nbytes
        self.copies = self.tiles = made
        self.stage_bytes = start

    def _place(self, operand: Operand, pointer: Value) -> Value:
        """Returns the address at which an operand of this CTA's matrix begins, at its first element of K."""
        at = self.batch_offset(operand.batch, operand.offset)
        if self.splits.first_k is not None: at = at + self.splits.first_k.to("u64") * operand.k
        return pointer + at * operand.dtype.itemsize

    # **** the loop ****

    def emit_kernel(self) -> GemmKernel:
        """The kernel, whole."""
        self.write()
        kb, s, scheduler, splits = self.kb, self.schedule, self.scheduler, self.splits
        return GemmKernel(kb.name, kb.ptx(), scheduler.grid, s.threads, kb.dynamic_smem,
                          workspace_bytes=splits.workspace_bytes, flags=splits.flags,
                          rows_of_cta=s.block_m if self.spec.symbolic else 0,
                          ctas_of_rows=scheduler.ctas_of_rows, pdl=kb.hopper)

    def write(self) -> None:
        """The whole text."""
        kb, spec = self.kb, self.spec
        kind = "f32" if instruction(spec.a.dtype, spec.b.dtype)[1].startswith("f32") else "s32"
        zero = 0.0 if kind == "f32" else 0
        self.sums: list[Sums] = [[[kb.regs(kind, 4, zero) for _ in range(self.warp_n // 8)]
                                  for _ in range(self.warp_m // 16)] for _ in range(spec.parts)]
        depth = min(self.schedule.depth, max(self.splits.least_tiles, 2 if self.splits.one_or_two else 1))
        ring = kb.shared("ring", max(self.stage_bytes * depth, self.plan.store.smem_bytes), align=1024)
        self.start, self.depth = ring.address(), depth
        if kb.hopper:
            for copy in self.copies: copy.ask()
            kb.wait_for_previous_grid()
        self._fill()
        if self.promoted: self._multiply_promoted()
        else: self._multiply()
        if kb.hopper: kb.launch_dependents()
        with self.splits.finish_last([cell for part in self.sums for row in part for cell in row]):
            self.store()

    def _fill(self) -> None:
        """Starts the copies of the first tiles."""
        kb, ahead = self.kb, max(self.depth - 1, 1)
        with kb.comment(f"the first {ahead} tiles"):
            for stage in range(ahead):
                for copy in self.copies: copy.next(self.start + stage * self.stage_bytes, first=stage == 0)
                kb.cp_async_commit()

    def ring_bytes(self) -> Value | int:
        """Bytes of the stages that tiles take in turns."""
        return self.depth * self.stage_bytes

    def _multiply_promoted(self) -> None:
        """The same with sums of their own for each so much of K, which are added to the others."""
        self.zeros, self.totals = [self.kb.reg("f32", 0.0)] * 4, self.sums
        self.sums = [[[self.kb.regs("f32", 4) for _ in row] for row in part] for part in self.totals]
        self._multiply()
        self.sums = self.totals

    def _multiply(self) -> None:
        kb, ahead, tiles = self.kb, self.depth - 1, self.splits.tiles
        self.reading = kb.reg("u32", name="reading").set(self.start)
        self.writing = kb.reg("u32", name="writing").set(self.start + ahead * self.stage_bytes)
        self.end = self.start + self.ring_bytes()
        double = self.double_buffered()
        sets = [[f.registers() for f in self.fragments] for _ in range(1 + double)]
        if double:
            self._wait_stage()
            self._load(0, sets[0])
        with kb.loop(0, tiles, name="tile") as tile:
            if self.promoted: kb.nounroll()     # where tiles are few, two sets of sums would spill
            if not double: self._wait_stage()
            else: self._at_stage()  # once more: a sum with what all threads share costs nothing
            if ahead: self._copy(tile < tiles - ahead)
            if double: self._steps_in_turns(sets)
            else: self._steps(sets[0])
        kb.cp_async_wait(0)

    def _steps(self, registers: Operands) -> None:
        """A tile's steps, one after the other."""
        for step in range(self.steps):
            with self.kb.comment(f"step {step}"):
                self._load(step, registers)
                self._multiply_step(registers, step)
        self._next_stage()

    def _steps_in_turns(self, sets: list[Operands]) -> None:
        """A tile's steps; the fragments of each are read while the one before multiplies."""
        for step in range(self.steps):
            if step == self.steps - 1:
                with self.kb.comment("the next tile"):
                    self._next_stage()
                    self._wait_stage()
            with self.kb.comment(f"step {step}"):
                self._multiply_step(sets[step % 2], step, sets[(step + 1) % 2])

    def double_buffered(self) -> bool:
        """Whether there are registers for fragments of two steps; they take turns, so steps are even. Single
        bytes are four registers and more each while they are read."""
        bytes_apart = any(tile.mn_major and tile.operand.dtype.itemsize == 1 for tile in self.tiles)
        if self.splits.one_or_two or bytes_apart:
            return False  # a split of one tile has no second one to read fragments of
        sums = self.warp_m * self.warp_n * self.spec.parts // 32 * (1 + self.promoted)
        fragments = (self.warp_m + self.warp_n * self.spec.parts) // 4
        return self.steps % 2 == 0 and sums + 2 * fragments <= REGISTERS

    def _wait_stage(self) -> None:
        """The tile that is read next is in; all warps have read the one whose place is taken next."""
        self.kb.cp_async_wait(max(self.depth - 2, 0))
        self.kb.sync()
        self._at_stage()

    def _copy(self, when: Value) -> None:
        """The tile that takes the place of the one before, if there is one left."""
        with self.kb.comment(f"the tile {self.depth - 1} further on"):
            for copy in self.copies: copy.next(self.writing, when)
            self.kb.cp_async_commit()

    def _next_stage(self) -> None:
        self.writing.set(self.reading)
        self.reading += self.stage_bytes
        self.reading.set(self.kb.select(self.reading == self.end, self.start, self.reading))

    def _at_stage(self) -> None:
        """Fragments are read from the tile at `reading` from now on."""
        for fragments in self.fragments: fragments.move(self.reading)

    def _load(self, step: int, into: Operands) -> None:
        """Fragments of a step of the tile at `reading`."""
        for fragments, registers in zip(self.fragments, into, strict=True): fragments.load(step, registers)

    def _multiply_step(self, operands: Operands, step: int, after: Operands | None = None) -> None:
        """All mmas of the warp's tile for one step; between them, the fragments of the one after it."""
        shape, types = instruction(self.spec.a.dtype, self.spec.b.dtype)
        (a, *parts), following = operands, (step + 1) % self.steps
        if after:
            for fragments, registers in zip(self.fragments[1:], after[1:], strict=True):
                fragments.load(following, registers)
        for i, left in enumerate(a):
            for b, sums in zip(parts, self.sums, strict=True):
                for j, cell in enumerate(sums[i]):
                    half = 2 * (j % 2)
                    addend = self.zeros if self.promoted and step % PROMOTED_STEPS == 0 else cell
                    self.kb.mma(shape, types, cell, left, b[j // 2][half:half + 2], addend)
            if after: self.fragments[0].load_one(i, following, after[0][i])
        if self.promoted and following % PROMOTED_STEPS == 0: self.promote()

    def promote(self) -> None:
        """Adds the sums of so much of K to the others. ptxas puts each between the mmas of the last step."""
        for part, more in zip(self.totals, self.sums, strict=True):
            for row, sums in zip(part, more, strict=True):
                for total, each in zip(row, sums, strict=True):
                    for r in range(4): total[r] += each[r]

    # **** the result ****

    def store(self) -> None:
        """The epilogue of the warp's share of the tile, by way of the ring, which is no longer needed."""
        kb = self.kb
        if self.plan.store.smem_bytes: kb.sync()
        rows = self.rows if isinstance(self.rows, Value) else kb.reg("u32", self.rows)
        store = Store(kb, self.spec.store_target, self.plan.store, self.out, self.extras, rows, self.start)
        cells = [Cell(16 * i, 8 * j, [part[i][j] for part in self.sums])
                 for i in range(self.warp_m // 16) for j in range(self.warp_n // 8)]
        store.tile(self.first_m + self.row, self.first_n + self.column, self.scheduler.batch, cells)
        store.finish()
