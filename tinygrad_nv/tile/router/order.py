"""The order of slots, from experts and ranks (kernel.py): sums over CTAs, offsets, places.

Protocol: threads below the number of experts have an expert each. All functions are for all threads of a CTA.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance

DEEP = 8    # counts that a thread loads together


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


def over_ctas(kb: Kernel, counts: Value, scratch: Shared, ctas: int, experts: int,
              ways: int) -> tuple[Value, Value]:
    """The sum of all CTAs' counts of the thread's expert, and of the CTAs before this one, in threads below
    `experts`; `ways` threads divide the CTAs among them."""
    total, before = kb.reg("u32", 0), kb.reg("u32", 0)
    pitch = kb.threads[0] // ways
    expert, way = kb.tid.x % pitch, kb.tid.x // pitch
    there = expert < experts
    with kb.comment("counts of all CTAs"):
        at = advance(kb, advance(kb, counts, expert, 4), way, 4 * experts)
        with kb.loop(way, ctas, ways * DEEP) as first:
            found = kb.regs("u32", DEEP, 0)
            for i, count in enumerate(found):
                kb.emit("ld.global.u32", count, at.at(4 * experts * ways * i),
                       guard=there & (first + ways * i < ctas))
            for i, count in enumerate(found):
                total += count
                kb.emit("add.u32", before, before, count, guard=first + ways * i < kb.ctaid.x)
            at += 4 * experts * ways * DEEP
        if ways == 1: return total, before
        for i, value in enumerate((total, before)):
            kb.emit("st.shared.u32", scratch.address((kb.tid.x + i * kb.threads[0]) * 4).at(), value)
        kb.sync()
        for i, value in enumerate((total, before)):
            from_ = scratch.address(expert * 4)
            for other in range(ways):
                one = kb.ld("shared", "u32", from_.at(4 * (i * kb.threads[0] + pitch * other)))[0]
                if other: value += one
                else: value.set(one)
    return kb.select(kb.tid.x < pitch, total, 0, "u32"), before
