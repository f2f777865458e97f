"""Sums of outer products of the rows of groups with wgmma (outer.py): gemm/wgmma's kernel, over as many rows
as a group has. For sm_90a.

    producer, one thread:                        two warps beside it:
        for each tile of this CTA:                   for each tile: the rows of its group
            arrive at the first stage                    the first stage: what is left of rows by block_k,
            for each further stage:                          zeros beyond
                boxes of what lies in order              each further stage: what an order names

    consumers: the main loop and the epilogue of gemm/wgmma, of yᵀ and x, which both lie along their columns

A group without rows has one stage of zeros. Sums do not depend on how rows are dealt to CTAs: one CTA has a
tile's.

How rows of y and x come to the stages of a tile: by TMA, and by cp.async of the threads beside it.

Protocol: `OuterLoads.place` at each tile, then `issue` for each stage but the first: boxes of the operand
that is not gathered. A `RowCopy` of each operand copies all of its first stage, zeros beyond the group's rows
and the matrix's columns, so that no row of another group is read, and where it is gathered whole stages, too.
Eight threads have a row of a box, in the swizzle that TMA would have made; the slots of a stage are read
while the one before is copied.

Tiles are those of gemm/wgmma, a matrix for each group. A tile has `rows` of its group (u32: the first, and
how many), and as many stages as they fill, at least one. The first stage has what is left of the rows by
`block_k`: all others are full. Where a group's rows lie is read one tile ahead.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads, OperandLoads
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner, PersistentTileScheduler, WorkTile
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.outer_wgmma.plan import LOADERS, SPAN, OuterPlan
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterWgmma
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.pipeline import PipelineState
from tinygrad_nv.tile.template import GPU

CHUNK = 16                      # bytes that a thread copies
EIGHT = SPAN // CHUNK           # chunks of a row of a box
AT_ONCE = LOADERS // EIGHT      # rows
OF_WARP = 32 // EIGHT           # of those, a warp's


def grouped_outer_wgmma(spec: GroupedOuterSpec, schedule: GroupedOuterWgmma, gpu: GPU) -> GemmKernel:
    """The kernel. Pointers in this order: out; y; x; offsets; order, where the spec has one."""
    plan = OuterPlan.for_groups(spec, schedule)
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return _OuterKernel(kb, plan, plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count)).emit_kernel()


class _OuterKernel(WgmmaKernel):
    LOADERS = LOADERS
    plan: OuterPlan
    scheduler: OuterTileScheduler
    loads: OuterLoads

    def __init__(self, kb: Kernel, plan: OuterPlan, ctas: int) -> None:
        self.OPERANDS = ("y", "x", "offsets", *["order"] * plan.outer.has_order)
        super().__init__(kb, plan, ctas)

    def make_scheduler(self, pointers: Mapping[str, Value], rows: Value | int) -> PersistentTileScheduler:
        self.pointers = pointers
        return OuterTileScheduler(self.kb, self.plan, self.ctas, pointers["offsets"])

    def make_loads(self, first_pointer: int) -> OuterLoads:
        return OuterLoads(self.kb, self.plan, first_pointer)

    def produce(self) -> None:
        kb = self.kb
        with kb.if_(kb.elect()):
            at = self.ring.cursor(producer=True)
            kb.wait_for_previous_grid()
            with self.scheduler.work_tiles() as work_tile:
                self.loads.place(self.scheduler.corner(work_tile.number), self.scheduler.rows)
                kb.mbarrier_arrive(self.ring.vacant(at))
                at.advance()
                with kb.loop(1, work_tile.count, kind="u32"):
                    full = self.ring.acquire(at)
                    self.loads.issue(at.stage, full)
                    at.advance()
            kb.launch_dependents()

    def load_beside(self) -> None:
        kb, at = self.kb, self.ring.cursor(producer=True)
        kb.wait_for_previous_grid()
        copies = self._copies()
        with self.scheduler.work_tiles() as work_tile:
            corner = self.scheduler.corner(work_tile.number)
            for each in copies: each.begin(self.scheduler.rows)
            full = self.ring.vacant(at)
            for each, column in zip(copies, (corner.m, corner.n), strict=True): each.first(at.stage, column)
            self._arrive(at, full)
            with kb.loop(1, work_tile.count, kind="u32"):
                full = self.ring.vacant(at)
                for each in copies:
                    if each.gather: each.issue(at.stage)
                self._arrive(at, full)

    def _copies(self) -> list[RowCopy]:
        """Returns the copies of y and x."""
        kb, plan, outer, given = self.kb, self.plan, self.plan.outer, self.pointers
        thread = kb.tid.x - (plan.schedule.threads - LOADERS)
        sides = zip((plan.a, plan.b), ("y", "x"), self.loads.starts, (outer.n, outer.k), plan.gather_slots,
                    strict=True)
        return [RowCopy(kb, tile, given[name], start, columns, gather, given.get("order"), thread)
                for tile, name, start, columns, gather in sides]

    def _arrive(self, at: PipelineState, full: MemoryOperand) -> None:
        """At the barrier of a stage, once this thread's copies are there."""
        self.kb.emit("cp.async.mbarrier.arrive.noinc.shared.b64", full)
        at.advance()


class OuterLoads(GemmLoads):
    """Boxes of what is not gathered; one thread."""
    plan: OuterPlan

    def _side(self, name: str, start: int, operand: Operand, tile: OperandTile, pointer: int, extent: int,
              rows: int, peers: int, symbolic: bool = False, k: int = 0) -> OperandLoads:
        kb = self.kb
        if not self.plan.gather_slots[name == "b"]:
            return super()._side(name, start, operand, tile, pointer, extent, rows, peers, symbolic, k)
        ring = self.ring.address(start)
        return OperandLoads(operand, tile, ring, ring, [], rows, None, None, kb.reg("s32"), kb.reg("s32"))

    def place(self, corner: Corner, rows: Rows) -> None:
        """The next stage is the second of a tile."""
        super().begin(corner)
        for side in (self.a, self.b): side.at_k.set((rows.begin + rows.residue).to("s32"))

    def issue(self, stage: Value, full: MemoryOperand) -> None:
        """Copies of one whole stage; rows move on."""
        for side, gather in zip((self.a, self.b), self.plan.gather_slots, strict=True):
            if gather: continue
            self.copy_boxes(side, 0, side.maps[0], side.target + stage * side.tile.nbytes, full)
            side.at_k += side.tile.k


class RowCopy:
    """Copies of an operand's rows, which have `columns` columns, to its stages, which begin at `start`;
    `gather` slots of `order` a row, 0: rows in order. A lane has the slot of one of its warp's rows."""

    def __init__(self, kb: Kernel, tile: OperandTile, pointer: Value, start: Value, columns: int, gather: int,
                 order: Value | None, thread: Value) -> None:
        self.kb, self.tile, self.pointer, self.order = kb, tile, pointer, order
        self.columns, self.gather = columns, gather
        self.row, self.chunk = thread // EIGHT, thread % EIGHT
        self.place = start + (self.row * SPAN + ((self.chunk ^ self.row % EIGHT) * CHUNK))
        self.passes = tile.k // AT_ONCE
        if not gather: return
        lane = kb.special("laneid")
        self.source_lane = lane // EIGHT
        self.own = lane // OF_WARP * AT_ONCE + (thread // 32 * OF_WARP + lane % OF_WARP)
        self.slot, self.next_row = kb.reg("u32"), kb.reg("u32")     # the row whose slot is read next

    @property
    def pitch(self) -> int:
        """Bytes of a row."""
        return self.columns * self.tile.size

    def begin(self, rows: Rows) -> None:
        """The next stage is the first of a tile."""
        self.rows = rows
        if not self.gather: return
        self.next_row.set(rows.begin + self.own)
        self._read(self.own < rows.residue)
        self.next_row += rows.residue

    def first(self, stage: Value, column: Value) -> None:
        """The first stage of a tile from `column` on."""
        size = self.tile.size
        self.at = self.pointer + (column * size + self.chunk * CHUNK).to("u64")
        self.left = (self.columns - column.to("s32")) * size - (self.chunk * CHUNK).to("s32")
        inside = [self.row + AT_ONCE * i < self.rows.residue for i in range(self.passes)]
        if self.gather:
            self._gather(stage, inside)
            return
        at = advance(self.kb, self.at, self.rows.begin + self.row, self.pitch)
        for i, each in enumerate(inside):
            self._copy(stage, i, at, each)
            at += AT_ONCE * self.pitch

    def issue(self, stage: Value) -> None:
        """A whole stage of gathered rows."""
        self._gather(stage, [None] * self.passes)

    def _gather(self, stage: Value, inside: Sequence[Value | None]) -> None:
        kb, offset = self.kb, self.slot // self.gather * self.pitch
        self._read(self.next_row < self.rows.end)
        self.next_row += self.tile.k
        for i, each in enumerate(inside):
            own = kb.reg("u32")
            kb.emit("shfl.sync.idx.b32", own, offset, self.source_lane + OF_WARP * i, 31, -1)
            self._copy(stage, i, self.at + own.to("u64"), each)

    def _read(self, guard: Value) -> None:
        """A slot; 0 for a row that is not there."""
        assert self.order is not None
        self.slot.set(0)
        self.kb.emit("ld.global.u32", self.slot, advance(self.kb, self.order, self.next_row, 4).at(),
                     guard=guard)

    def _copy(self, stage: Value, i: int, at: Value, inside: Value | None) -> None:
        """Rows number `i` of each thread, of all boxes."""
        kb, tile = self.kb, self.tile
        place = self.place + stage * tile.nbytes
        for box in range(tile.columns):
            outside = [] if inside is None else [~inside]
            if self.columns % tile.mn:
                beyond = self.left <= box * SPAN
                outside = [beyond if inside is None else beyond | ~inside]
            kb.emit("cp.async.cg.shared.global", place.at(box * tile.column_bytes + i * AT_ONCE * SPAN),
                    at.at(box * SPAN), CHUNK, *outside)


@dataclass(frozen=True)
class Rows:
    """Rows of a group: the first of all rows, and the end; its stages, of which the first has `residue`
    rows."""
    begin: Value
    end: Value
    stages: Value
    residue: Value


class OuterTileScheduler(PersistentTileScheduler):
    """Tiles of all groups, in the order of groups; `offsets` are the kernel's."""

    def __init__(self, kb: Kernel, plan: OuterPlan, ctas: int, offsets: Value) -> None:
        super().__init__(kb, plan, plan.spec.m, ctas)
        self.offsets = offsets
        self.last = plan.tiles - 1
        self.of_group = plan.tiles // plan.outer.groups

    @contextmanager
    def work_tiles(self, turn: Value | None = None) -> Iterator[WorkTile]:
        """Emits the code inside so that it is done for each tile; its rows are `rows`."""
        kb = self.kb
        ahead = kb.regs("s32", 2)
        self._read(self.first, ahead)
        with kb.loop(self.first, self.total, self.step) as number:
            self.rows = self._rows(kb.reg("s32", ahead[0]), kb.reg("s32", ahead[1]))
            following = kb.reg("u32")
            kb.emit("min.u32", following, number + self.step, self.last)
            self._read(following, ahead)
            yield WorkTile(number, 0, self.rows.stages)

    def _read(self, number: Value, ahead: list[Value]) -> None:
        at = advance(self.kb, self.offsets, number // self.of_group, 4)
        for i, each in enumerate(ahead): self.kb.emit("ld.global.s32", each, at.at(4 * i))

    def _rows(self, begin: Value, end: Value) -> Rows:
        kb, block = self.kb, self.plan.schedule.block_k
        count, stages = kb.reg("s32"), kb.reg("s32")
        kb.emit("max.s32", count, end - begin, 0)
        kb.emit("max.s32", stages, (count + (block - 1)) // block, 1)
        residue = count - (stages - 1) * block
        return Rows(begin.to("u32"), end.to("u32"), stages.to("u32"), residue.to("u32"))
