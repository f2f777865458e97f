"""One tile's sum by several CTAs: which tiles along K each has, and how their sums are reduced.

Protocol: split s of S has `tiles` tiles of K in a row; where they do not divide, the first splits have one
more. Each CTA leaves its sums in its place of the workspace, then counts itself in the tile's flag; the CTA
that finds S - 1 there is the last, adds all sums up in the order of the splits, and alone goes on to the
epilogue. So the result does not depend on the order of CTAs, and none waits: CTAs of a tile need not run at
the same time.

The workspace has for each tile and split, cell after cell, 16 bytes of each thread.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.tile_scheduler import TileScheduler, tiles_of

CELL_BYTES = 16


class Splits:
    """`tiles`: how many tiles of K this CTA has; `least_tiles`: at least; `first_k`: where they begin (None:
    at 0); `residue`: elements of K in the first of them; `one_or_two`: some have two, others one. `cells` of
    four sums each a thread holds."""

    def __init__(self, kb: Kernel, spec: GemmSpec, schedule: Mma, cells: int) -> None:
        self.kb, self.spec, self.schedule, self.cells = kb, spec, schedule, cells
        self.count = schedule.splits
        self.least_tiles, self.more = divmod(-(-spec.k // schedule.block_k), self.count)
        self.one_or_two = self.least_tiles == 1 and self.more > 0
        self.residue: Value | int = spec.k % schedule.block_k or schedule.block_k
        self.tiles: Value | int = self.least_tiles
        self.first_k: Value | None = None
        self.flags = tiles_of(spec, schedule) * spec.matrices if self.count > 1 else 0
        self.slot_bytes = cells * CELL_BYTES * schedule.threads
        self.workspace_bytes = self.flags * self.count * self.slot_bytes

    def declare(self) -> None:
        """The kernel's parameters."""
        if self.count > 1:
            self.workspace, self.flag = self.kb.pointer("workspace"), self.kb.pointer("flags")

    def begin(self, scheduler: TileScheduler) -> None:
        """Computes the CTA's part of K."""
        if self.count == 1: return
        kb, block = self.kb, self.schedule.block_k
        self.number, self.split = scheduler.number, scheduler.split
        first = self.split * self.least_tiles
        if self.more:
            smaller = kb.reg("u32")
            kb.emit("min.u32", smaller, self.split, self.more)
            first = first + smaller
            self.tiles = kb.select(self.split < self.more, self.least_tiles + 1, self.least_tiles)
        missing = self.spec.k % block and block - self.spec.k % block
        self.first_k = first * block
        if missing:  # the first tile of all is the one that is not full
            self.first_k = kb.select(self.split == 0, 0, self.first_k - missing)
            self.residue = kb.select(self.split == 0, block - missing, block, "u32")

    @contextmanager
    def finish_last(self, cells: Sequence[Sequence[Value]]) -> Iterator[None]:
        """Runs the block in the CTA that comes last, with all sums in the registers."""
        if self.count == 1:
            yield
            return
        with self.kb.comment(f"sums of {self.count} CTAs"): mine = self._slot(self.split)
        for i, cell in enumerate(cells): self.kb.st("global", self._kind(cell), self._at(mine, i), cell)
        arrivals = self.kb.shared("arrived", 4)
        with self.kb.if_(is_last(self.kb, self.flag, self.number, arrivals.at(), self.count)):
            self._gather(cells)
            yield

    def _kind(self, cell: Sequence[Value]) -> str: return cell[0].kind

    def _slot(self, split: Value) -> Value:
        """A split's place in the workspace, of this thread: u64."""
        slot = (self.number * self.count + split).to("u64") * self.slot_bytes
        return self.workspace + slot + (self.kb.tid.x * CELL_BYTES).to("u64")

    def _at(self, slot: Value, cell: int) -> MemoryOperand:
        return slot.at(cell * CELL_BYTES * self.schedule.threads)

    def _gather(self, cells: Sequence[Sequence[Value]]) -> None:
        """The sums of all splits, in their order."""
        kb, slot = self.kb, self._slot(self.kb.reg("u32", 0))
        for i, cell in enumerate(cells):
            parts = kb.ld("global", self._kind(cell), self._at(slot, i), 4)
            for register, part in zip(cell, parts, strict=True): register.set(part)
        with kb.loop(1, self.count):
            slot += self.slot_bytes
            for i, cell in enumerate(cells):
                parts = kb.ld("global", self._kind(cell), self._at(slot, i), 4)
                for register, part in zip(cell, parts, strict=True): register += part


def is_last(kb: Kernel, flags: Value, tile: Value, arrivals: MemoryOperand, count: int) -> Value:
    """Counts this CTA in at the flag of a tile; whether it is the last of `count`, which all threads learn by
    the shared word `arrivals`. One thread releases and acquires for all: what the barriers order before its
    atomic, and after, is ordered too."""
    kb.sync()
    with kb.if_(kb.tid.x == 0):
        before, flag = kb.reg("u32"), flags + tile.to("u64") * 4
        kb.emit("atom.acq_rel.gpu.global.add.u32", before, flag.at(), 1)
        kb.st("shared", "u32", arrivals, before)
    kb.sync()
    return kb.ld("shared", "u32", arrivals)[0] == count - 1
