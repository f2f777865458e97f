"""Tokens sorted by their rows of a table (templates.py): the first kernel of a gradient. For sm_80 and later.

    each CTA has a tile of rows, each of its warps a part of the tokens:
        twice, for each 32 tokens of the part, their rows one in a lane:
            first:  count the tokens of rows before the tile; count those of each row of the tile
            second: order[offset of the row + how many of the row came before] = token
        between: counts become those of the warps before, sums of them offsets

Every CTA reads all tokens, from L2, and so knows where its own begin without another CTA. Counts are
integers, in the order of tokens; lanes with one row find each other (match.any).
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.embedding.kernel import load_row_index, token_place
from tinygrad_nv.tile.embedding.templates import GradientPlan
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.lanes import across

WARPS = 16
DEEP = 8        # tokens of a lane whose loads are under way together, or counts of a thread


def sort_tokens(plan: GradientPlan, arch: str) -> TileKernel:
    """The kernel. Parameters in this order: out; workspace; tokens; grad."""
    kb = Kernel("embedding_sort", arch=arch, threads=32 * WARPS)
    _Sort(kb, plan).write()
    return TileKernel(kb.name, kb.ptx(), (plan.tiles, 1, 1), 32 * WARPS, kb.dynamic_smem, pdl=kb.hopper)


class _Sort:
    """The kernel under construction."""

    def __init__(self, kb: Kernel, plan: GradientPlan) -> None:
        self.kb, self.plan, self.spec = kb, plan, plan.spec
        _, self.workspace, self.tokens, _ = (kb.pointer(each) for each in ("out", "work", "tokens", "grad"))
        self.lane, self.warp = kb.special("laneid"), kb.tid.x >> 5
        self.seen = kb.shared("seen", 4 * WARPS * plan.tile)    # counts of each warp's tokens
        self.places = kb.shared("places", 4 * plan.tile)        # where a row's tokens begin
        self.first = kb.ctaid.x * plan.tile
        self.rows = kb.reg("u32")
        kb.emit("min.u32", self.rows, self.spec.rows - self.first, plan.tile)
        self.own = self.seen.address(self.warp * (4 * plan.tile))

    def write(self) -> None:
        """The kernel."""
        kb, plan = self.kb, self.plan
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        with kb.comment("counts of this warp"):
            for i in range(0, plan.tile, 32): kb.st("shared", "u32", (self.own + self.lane * 4).at(4 * i), 0)
            kb.emit("bar.warp.sync", -1)
        before = kb.reg("u32", 0)
        for _, row in self.each_token():
            kb.emit("add.u32", before, before, 1, guard=row < self.first)
            for at, mates, _ in self.mates(row): self.count(at, mates)
        self.offsets(before)
        with kb.comment("places of tokens"):
            for token, row in self.each_token():
                for at, mates, local in self.mates(row): self.place(token, at, mates, local)

    def each_token(self) -> Iterator[tuple[Value, Value]]:
        """A token of the lane and its row; what uses them is written once for each of DEEP, in a loop."""
        kb, count = self.kb, self.spec.tokens.count
        deep = min(DEEP, -(-count // (32 * WARPS)))
        step = 32 * deep
        part = -(-count // (WARPS * step)) * step
        begin, end = self.warp * part, kb.reg("u32")
        kb.emit("min.u32", end, begin + part, count)
        with kb.loop(begin, end, step, kind="u32") as base:
            some = [base + self.lane + 32 * i for i in range(deep)]
            rows = [load_row_index(kb, self.spec, token_place(kb, self.spec, self.tokens, token), token < end)
                    for token in some]
            yield from zip(some, rows, strict=True)

    def mates(self, row: Value) -> Iterator[tuple[Value, Value, Value]]:
        """In warps that have a row of the tile: where the warp counts the lane's row, the lanes that have it
        too (none where it is of another tile), and its number in the tile."""
        kb, some = self.kb, self.kb.reg("pred")
        local = row - self.first
        here = local < self.rows
        kb.emit("vote.sync.any.pred", some, here, -1)
        with kb.if_(some):
            mates = kb.reg("b32")
            key = kb.select(here, local, self.plan.tile, "u32")
            kb.emit("match.any.sync.b32", mates, key, -1)
            yield self.own + key * 4, kb.select(here, mates, 0, "b32"), key
            kb.emit("bar.warp.sync", -1)

    def count(self, at: Value, mates: Value) -> None:
        """Adds the lanes of a row to its count, in the first of them."""
        kb, many, seen = self.kb, self.kb.reg("u32"), self.kb.reg("u32")
        leads = (mates != 0) & ((mates & kb.special("lanemask_lt")) == 0)
        kb.emit("popc.b32", many, mates)
        with kb.if_(leads):
            kb.emit("ld.shared.u32", seen, at.at())
            kb.emit("st.shared.u32", at.at(), seen + many)

    def offsets(self, before: Value) -> None:
        """Offsets of the tile's rows to memory and to shared memory."""
        kb, plan, rows = self.kb, self.plan, self.spec.rows
        totals = kb.shared("totals", 4 * WARPS)
        lanes = across(kb, before, "add.u32")
        kb.emit("st.shared.u32", totals.address(self.warp * 4).at(), lanes, guard=self.lane == 0)
        kb.sync()
        count = before_warps(kb, self.seen, WARPS, plan.tile)
        made = offset_of(kb, kb.shared("sums", 4 * WARPS), count, plan.tile)
        for warp in range(WARPS): made += kb.ld("shared", "u32", totals.at(4 * warp))[0]
        row = self.first + kb.tid.x
        at = advance(kb, self.workspace, row, 4)
        with kb.if_(kb.tid.x < self.rows):
            kb.st("shared", "u32", self.places.address(kb.tid.x * 4).at(), made)
            kb.st("global", "u32", at.at(), made)
            kb.emit("st.global.u32", at.at(4), made + count, guard=row == rows - 1)
        kb.sync()

    def place(self, token: Value, at: Value, mates: Value, local: Value) -> None:
        """Tokens to their places in the order."""
        kb = self.kb
        seen, many, earlier = kb.regs("u32", 3)
        lower = mates & kb.special("lanemask_lt")
        kb.emit("popc.b32", many, mates)
        kb.emit("popc.b32", earlier, lower)
        there = mates != 0
        with kb.if_(there):
            kb.emit("ld.shared.u32", seen, at.at())
            start = kb.ld("shared", "u32", self.places.address(local * 4).at())[0]
            place = advance(kb, self.workspace, start + seen + earlier, 4)
            kb.st("global", "u32", place.at(4 * self.plan.order_at), token)
        kb.emit("bar.warp.sync", -1)
        kb.emit("st.shared.u32", at.at(), seen + many, guard=there & (lower == 0))


def before_warps(kb: Kernel, counts: Shared, warps: int, experts: int) -> Value:
    """Counts of warps [warps][experts] become those of the warps before; the CTA's count of the thread's
    expert, 0 of none."""
    total = kb.reg("u32", 0)
    with kb.comment("counts of the warps before"), kb.if_(kb.tid.x < experts):
        at = counts.address(kb.tid.x * 4)
        for first in range(0, warps, DEEP):
            some = range(first, min(first + DEEP, warps))
            found = [kb.ld("shared", "u32", at.at(4 * experts * warp))[0] for warp in some]
            for warp, count in zip(some, found, strict=True):
                kb.st("shared", "u32", at.at(4 * experts * warp), total)
                total += count
    return total


def offset_of(kb: Kernel, scratch: Shared, count: Value, experts: int) -> Value:
    """The sum of the counts of all threads before this one."""
    kept, lane, warp = kb.reg("u32", count), kb.special("laneid"), kb.tid.x >> 5
    with kb.comment("offsets: of the warp, then of the warps before"):
        for distance in (1, 2, 4, 8, 16):
            other = kb.reg("u32")
            kb.emit("shfl.sync.up.b32", other, kept, distance, 0, -1)
            kb.emit("add.u32", kept, kept, other, guard=lane >= distance)
        kb.emit("st.shared.u32", scratch.address(warp * 4).at(), kept, guard=lane == 31)
        kb.sync()
        made = kept - count
        for each in range(-(-experts // 32) - 1):
            total = kb.ld("shared", "u32", scratch.at(4 * each))[0]
            kb.emit("add.u32", made, made, total, guard=warp > each)
    return made
