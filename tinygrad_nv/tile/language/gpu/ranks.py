"""Ranks among equal numbers.

Protocol: of the bits of an index lanes hold the lowest, then registers, then warps (`ranks_layout`):
a warp has one part of the tile, and each of its registers 32 elements of that, side by side. Lanes with one
number find each other (match.any), and go on counting where their warp has stopped, in its own row of shared
memory. Then counts become those of the warps before. No warp waits for the sums of another, and nothing
depends on the order in which they run. A register none of whose lanes has a number that counts is gone past.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.language.gpu.access import fetch
from tinygrad_nv.tile.language.gpu.collective import Collective
from tinygrad_nv.tile.language.gpu.convert import address
from tinygrad_nv.tile.language.gpu.held import Held
from tinygrad_nv.tile.language.gpu.layout import LANE_BITS, Layout, ranks_layout
from tinygrad_nv.tile.language.ir import Op

WORD = 4
DEEP = 8        # rows of warps whose counts are read together


class Ranks(Collective):
    """Ranks among equal numbers."""

    def do_rank(self, op: Op) -> None:
        source, ranks, bins = op.operands[0], op.results[0], op.attributes["bins"]
        layout = ranks_layout(source.shape, self.threads.bits)
        held, arena, warps = self.value(source, layout), self.arena, 1 << self.threads.bits - LANE_BITS
        row, nbytes = bins * WORD, (warps + 1) * bins * WORD
        with arena.scratch(nbytes) as start:
            arena.writes(start, nbytes)
            own = address(self, start, self._rows_of_warps(row, range(self.threads.bits)))
            self._clear(own, bins)
            found = [None if held.parts[i // held.width] is None else self._count(held, i, own, bins)
                     for i in range(layout.count)]
            self.arena.sync()
            self._add_up(start, bins, layout)
            self.arena.sync()
            if self.assignment.uses.get(ranks):
                before = address(self, start, self._rows_of_warps(row, self._sharing(layout)))
                made = [None if one is None else self._add_before(before, *one, bins) for one in found]
                self.put_held(ranks, Held(dtypes.int32, ranks.shape, layout,
                                          self.parts(dtypes.int32, ranks.shape, layout, made)))
            self._read_counts(op, start + warps * row)
            arena.reads(start, nbytes)

    def _rows_of_warps(self, row: int, places: range | list[int]) -> Register | int:
        """Bytes to a warp's row, of the bits of its number that make a difference."""
        return self.threads.sum([(at, row << at - LANE_BITS) for at in places if at >= LANE_BITS])

    def _sharing(self, layout: Layout) -> list[int]:
        """Bits of a thread's number that are not of copies."""
        return [at for at in range(self.threads.bits) if not layout.copies >> at & 1]

    def _clear(self, own: Register, bins: int) -> None:
        """Empties the warp's row."""
        kb, lanes = self.kb, 1 << LANE_BITS
        lane = kb.special("laneid")
        at = own + lane * WORD
        for first in range(0, bins, lanes):
            there = lane < bins - first if bins - first < lanes else None
            kb.emit("st.shared.u32", at.at(first * WORD), 0, guard=there)
        kb.emit("bar.warp.sync", -1)

    def _count(self, held: Held, register: int, own: Register, bins: int) -> tuple[Register, Register]:
        """A register's rank within the warp, and its number; one that is not less than `bins` where there is
        none that counts."""
        kb, number = self.kb, held.element(register)
        key, rank, some, mates = kb.reg("u32"), kb.reg("s32", 0), kb.reg("pred"), kb.reg("b32")
        kb.emit("mov.b32", key, number)
        if (inside := self.inside(held.layout, held.shape, register)) is not None:
            key = kb.select(inside, key, bins, "u32")
        here = key < bins
        kb.emit("vote.sync.any.pred", some, here, -1)
        with kb.if_(some):
            seen, many, earlier = kb.regs("u32", 3)
            kb.emit("match.any.sync.b32", mates, key, -1)
            lower, at = mates & self._lanes_before(held.layout), own + key * WORD
            kb.emit("popc.b32", many, mates & self._lanes(held.layout))
            kb.emit("popc.b32", earlier, lower)
            with kb.if_(here):
                kb.emit("ld.shared.u32", seen, at.at())
                kb.emit("add.u32", rank, seen, earlier)
            kb.emit("bar.warp.sync", -1)
            kb.emit("st.shared.u32", at.at(), seen + many, guard=here & (lower == 0))
            kb.emit("bar.warp.sync", -1)
        return rank, key

    def _lanes(self, layout: Layout) -> int:
        """The lanes that are no copies, as a mask."""
        return (1 << (1 << LANE_BITS - (layout.copies & (1 << LANE_BITS) - 1).bit_count())) - 1

    def _lanes_before(self, layout: Layout) -> Register:
        """Lanes ahead of the own one, or of that which it copies."""
        copies, made = layout.copies & (1 << LANE_BITS) - 1, self.kb.special("lanemask_lt")
        if not copies: return made
        return (self.kb.reg("u32", 1) << (self.kb.special("laneid") & ~copies & (1 << LANE_BITS) - 1)) - 1

    def _add_up(self, start: int, bins: int, layout: Layout) -> None:
        """Makes a warp's count of each number that of the warps before; behind them lies that of all."""
        kb, threads, row = self.kb, 1 << self.threads.bits, bins * WORD
        warps = [at for at in self._sharing(layout) if at >= LANE_BITS]
        rows = [0]
        for at in warps: rows += [one + (row << at - LANE_BITS) for one in rows]
        base = address(self, start, kb.tid.x.to("s32") * WORD)
        for first in range(0, bins, threads):
            there = kb.tid.x < bins - first if bins - first < threads else None
            total = kb.reg("u32", 0)
            for begin in range(0, len(rows), DEEP):
                places = [base.at(one + first * WORD) for one in rows[begin:begin + DEEP]]
                counts = kb.regs("u32", len(places))
                for count, place in zip(counts, places, strict=True):
                    kb.emit("ld.shared.u32", count, place, guard=there)
                for count, place in zip(counts, places, strict=True):
                    kb.emit("st.shared.u32", place, total, guard=there)
                    kb.emit("add.u32", total, total, count)
            kb.emit("st.shared.u32", base.at((threads >> LANE_BITS) * row + first * WORD), total, guard=there)

    def _add_before(self, before: Register, rank: Register, key: Register, bins: int) -> Register:
        """A rank in the warp behind those of the warps before."""
        kb = self.kb
        with kb.if_(key < bins):
            ahead, = kb.ld("shared", "s32", (before + key * WORD).at())
            kb.emit("add.s32", rank, rank, ahead)
        return rank

    def _read_counts(self, op: Op, start: int) -> None:
        """Counts of all warps, in the layout that asks for them."""
        counts = op.results[1]
        layout, shape = self.assignment.layout(counts), counts.shape
        base = address(self, start, self.threads.weigh(layout, shape, {0: WORD}))
        made = [fetch(self.kb, base, index * WORD, dtypes.int32, 1,
                      self.inside(layout, shape, register), 0, "shared")[0].at(0)
                for register, index in enumerate(layout.indices)]
        self.put(counts, self.parts(dtypes.int32, shape, layout, made))
