"""Scales of blocks by cp.async, a word each: their rows are not aligned as wider copies ask."""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.scaled_gemm.spec import BlockScales


class ScaleCopies:
    """Copies of one side's scales, of `count` blocks each, by `threads` threads, of which this is `thread`:
    those of a tile."""

    def __init__(self, kb: Kernel, scales: BlockScales, pointer: Value, thread: Value, threads: int,
                 count: int, extent: Value | int) -> None:
        self.kb, self.scales, self.pointer, self.extent = kb, scales, pointer, extent
        self.thread, self.threads = thread, threads
        self.at = kb.regs("u64", -(-count // threads))
        self.mine = [None if (i + 1) * threads <= count else thread < count - i * threads
                     for i in range(len(self.at))]

    def begin(self, first: Value, group: Value | int) -> None:
        """Begins the copies of the blocks of rows from `first` on, from a group on. Beyond the last, of the
        last."""
        kb, one = self.kb, self.scales
        start = self.pointer + one.offset * 4 if one.offset else self.pointer
        if isinstance(group, Value): start = advance(kb, start, group, one.k * 4)
        elif group: start = start + group * one.k * 4
        for i, at in enumerate(self.at):
            row = kb.reg("u32")
            kb.emit("min.u32", row, first + (self.thread + i * self.threads) * one.rows, self.extent - 1)
            at.set(advance(kb, start, row // one.rows if one.rows > 1 else row, one.mn * 4))

    def issue(self, stage: Value, when: Value | None = None) -> None:
        """Issues the copies of one group, into a stage, at this thread's place, where the predicate holds;
        the group after it is next."""
        for i, (at, mine) in enumerate(zip(self.at, self.mine, strict=True)):
            guard = mine if when is None else when if mine is None else mine & when
            self.kb.emit("cp.async.ca.shared.global", stage.at(4 * self.threads * i), at.at(), 4, guard=guard)
            at += self.scales.k * 4

    def back(self, groups: int) -> None:
        """So many groups before the next."""
        for at in self.at: at -= groups * self.scales.k * 4
