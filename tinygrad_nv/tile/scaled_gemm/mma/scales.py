"""Scales of a stage: to shared memory beside its tiles, and from there to the registers of a warp."""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.scaled_gemm.copy import ScaleCopies
from tinygrad_nv.tile.scaled_gemm.mma.plan import ScaledMmaPlan, Side

Scales = list[list[Value]]      # by 16 rows or 8 columns: those of a thread's two, or of all


@dataclass
class StageScales:
    """Copies the scales of a group: of rows, then of columns. The first is the last group, where K ends
    within it."""
    plan: ScaledMmaPlan
    rows: ScaleCopies
    columns: ScaleCopies
    place: Value

    def ask(self) -> None:
        """Nothing: what comes ahead is the tiles'."""

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        """Copies the next group's to the stage at a shared address (u32), where the predicate holds."""
        start = stage + self.place
        for side, nbytes in ((self.rows, 0), (self.columns, self.plan.row_scales.nbytes)):
            side.issue(start + nbytes if nbytes else start, when)
            if first and self.plan.ends_within: side.back(self.plan.spec.groups)


@dataclass
class SideScales:
    """A thread's scales of one side, from `first` (u32) of the tile on, `start` bytes after the beginning of
    a stage: of `step` rows or columns each, of which the thread has one and the one `apart` after it."""
    kb: Kernel
    side: Side
    first: Value
    start: int
    step: int
    apart: int

    def __post_init__(self) -> None:
        own = self.kb.reg("u32", self.start)
        if self.side.each: own = own + self.first * 4
        elif not self.side.one: own = own + self.first // self.side.scales.rows * 4
        self.own, self.at = own, self.kb.reg("u32")

    def move(self, stage: Value) -> None:
        """Reads from the stage at a shared address (u32) from now on."""
        self.kb.emit("add.u32", self.at, stage, self.own)

    def load(self) -> Scales:
        """Loads the scales of the stage."""
        side, starts = self.side, range(0, self.side.share, self.step)
        if not side.each:
            read = {index: self._read(index) for index in sorted({side.index(row) for row in starts})}
            return [[read[side.index(row)]] for row in starts]
        if self.apart == 1: return [self.kb.ld("shared", "f32", self.at.at(4 * row), 2) for row in starts]
        return [[self._read(row), self._read(row + self.apart)] for row in starts]

    def _read(self, index: int) -> Value: return self.kb.ld("shared", "f32", self.at.at(4 * index))[0]
