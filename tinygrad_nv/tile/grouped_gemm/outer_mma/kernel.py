"""Sums of outer products of the rows of groups with mma.sync (outer.py): the ring of gemm/mma, over as many
rows as a group has. For sm_80 and later, any extents.

    wait for the kernel before
    the rows of this CTA's group, from the offsets
    as gemm/mma, of yᵀ and x: both lie along their columns, fragments are read by ldmatrix.trans; the first
    stage has what is left of rows by block_k, zeros beyond, so that all others are full
    a group without rows fills one stage with zeros, multiplies nothing, and stores zeros

A stage is a part of the group's rows; rows of other groups are never read. With an order the slots of a
stage's rows are read one step before the rows are copied. Where a group has fewer stages than the
ring, the ring is as short. Results do not depend on how rows are dealt to CTAs: one CTA has a tile's sums.

An `OrderedCopy` is a `TileCopy` whose rows along K lie where slots of the order say. Slots are read before
their rows are copied: those of the first tiles all at once (`begin`), then in each step of the loop those of
the tile after the one that is copied, so that no copy waits for them.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.outer_mma.plan import matmul_of
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterMma
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import TileCopy, width_of
from tinygrad_nv.tile.template import GPU

SLOT_BYTES = 4


def grouped_outer_mma(spec: GroupedOuterSpec, schedule: GroupedOuterMma, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out; y; x; offsets; order, where the spec has one."""
    kb = Kernel("grouped_outer_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return _OuterKernel(kb, MmaPlan.of(matmul_of(spec, spec.rows), schedule.mma), spec).emit_kernel()


@dataclass(frozen=True)
class Group:
    """Its first row of all (u32), and its stages (s32), of which the first has `residue` rows (u32)."""
    first: Value
    stages: Value
    residue: Value


class _OuterKernel(MmaKernel):
    """A matmul's kernel whose K are the rows of a group, counted on the device."""

    def __init__(self, kb: Kernel, plan: MmaPlan, outer: GroupedOuterSpec) -> None:
        self.outer = outer
        super().__init__(kb, plan)

    def declare_params(self) -> tuple[Value, Value]:
        y, x, self.offsets = (self.kb.pointer(name) for name in ("y", "x", "offsets"))
        self.order = self.kb.pointer("order") if self.outer.has_order else None
        return y, x

    def make_copies(self, y: Value, x: Value) -> None:
        """The copies of rows of y, then of x."""
        outer, spec, s = self.outer, self.spec, self.schedule
        if self.kb.hopper: self.kb.wait_for_previous_grid()
        self.group = self._group()
        self.splits.tiles = self.group.stages
        above = self._copy_of(spec.a, y, self.first_m, spec.m, s.block_m, 0, outer.gather_y)
        across = self._copy_of(spec.b, x, self.first_n, spec.n, s.block_n, above.tile.nbytes, outer.gather_x)
        self.copies = self.tiles = [above, across]
        self.stage_bytes = across.start + across.tile.nbytes

    def _group(self) -> Group:
        kb, block = self.kb, self.schedule.block_k
        at = advance(kb, self.offsets, self.scheduler.matrix, 4)
        begin, end = (kb.ld("global", "s32", at.at(4 * i))[0] for i in range(2))
        count, full = kb.reg("s32"), kb.reg("s32")
        kb.emit("max.s32", count, end - begin, 0)
        stages = (count + (block - 1)) >> block.bit_length() - 1
        kb.emit("max.s32", full, stages - 1, 0)
        return Group(begin.to("u32"), stages, (count - full * block).to("u32"))

    def _copy_of(self, operand: Operand, pointer: Value, first: Value, extent: int, block: int, start: int,
                 gather: int) -> TileCopy:
        kb, group, own = self.kb, self.group, self.group.first
        width = width_of(operand, extent, 0)
        shape = first, extent, group.residue, width, block, self.schedule.block_k, start
        if not gather or self.order is None:
            rows = advance(kb, pointer, own, operand.k * operand.dtype.itemsize)
            return TileCopy(kb, operand, rows, *shape)
        order = advance(kb, self.order, own, SLOT_BYTES)
        return OrderedCopy(kb, operand, pointer, *shape, order, gather, group.stages)

    def ring_bytes(self) -> Value:
        """Returns the place of a stage: what is read ahead of the last stage is the first again, not one that
        was never filled."""
        stages, used = self.group.stages.to("u32"), self.kb.reg("u32")
        self.kb.emit("min.u32", used, stages, self.depth)
        return used * self.stage_bytes

    def _fill(self) -> None:
        """Starts the copies of the stages that there are; the first one's are zeros beyond its rows."""
        kb, ahead = self.kb, max(self.depth - 1, 1)
        for tile in self.tiles:
            if isinstance(tile, OrderedCopy): tile.begin(ahead)
        with kb.comment(f"the first {ahead} stages"):
            for stage in range(ahead):
                there = self.group.stages > stage if stage else None
                for copy in self.copies:
                    copy.next(self.start + stage * self.stage_bytes, there, first=stage == 0)
                kb.cp_async_commit()


@dataclass
class OrderedCopy(TileCopy):
    """Row i of the group is row order[i] // `gather` of the operand. `order` (u64) is where the group's slots
    begin, `tiles` (s32) how many tiles of rows it has."""
    order: Value
    gather: int
    tiles: Value

    def __post_init__(self) -> None:
        super().__post_init__()
        self.column = self.pointer + (self.first * self.size + self.byte).to("u64")
        self.slots_at = advance(self.kb, self.order, self.row, SLOT_BYTES)
        self.left = self.kb.reg("s32", self.tiles)      # tiles whose slots are not read yet
        self.rows = sorted({self.where(i)[0] for i in range(self.passes)})
        self.slots: list[dict[int, Value]] = []         # of the next tile, and at first of those after it
        self.sources: dict[int, Value] = {}

    def ask(self) -> None:
        """Nothing: where rows lie is not known before their slots are."""

    def begin(self, tiles: int) -> None:
        """Reads slots of so many tiles, and of one more."""
        self.slots = [{row: self.kb.reg("u32", 0) for row in self.rows} for _ in range(tiles + 1)]
        for i, slots in enumerate(self.slots): self._read(slots, first=i == 0)

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        kb, pitch, last = self.kb, self.operand.k * self.size, len(self.slots) == 1
        slots = self.slots[0] if last else self.slots.pop(0)
        self.sources = {row: advance(kb, self.column, slot // self.gather, pitch)
                        for row, slot in slots.items()}
        super().next(stage, when, first)
        if last: self._read(slots)

    def _read(self, slots: dict[int, Value], first: bool = False) -> None:
        """The slots of the next tile; of rows that are not there, nothing is read."""
        more = None if first else self.left > 0
        for row, slot in slots.items():
            guard = self.row + row < self.residue if more is None else more
            self.kb.emit("ld.global.u32", slot, self.slots_at.at(row * SLOT_BYTES), guard=guard)
        if isinstance(self.residue, Value) and first:
            self.slots_at += self.residue.to("u64") * SLOT_BYTES
        else: self.slots_at += self.block_k * SLOT_BYTES
        self.left -= 1

    def _advance(self, elements: Value | int) -> None:
        """The next tile's rows lie where its slots say."""

    def _at(self, row: int, column: int) -> MemoryOperand: return self.sources[row].at(column)
