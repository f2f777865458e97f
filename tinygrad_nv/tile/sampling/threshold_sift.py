"""The part of a long row that a filter looks at (threshold.py): what is above a floor, lane by lane, in
shared memory.

    most, mean of the row's finite logits; for each of `DOWN` the sum of weights above most − (most − mean) ·
    down, by all threads: of those with more than the target the highest is the floor
    each warp has every `WARPS`-th lane of the spec, 32 elements at a time:
        who is above the floor goes to the lane's list, in order, by a ballot

The sums are not in the order of the spec, so that a floor may be wrong: a user of a list adds it up. Lists
have room for `ROOM` elements a lane; where one has more, or no floor was found, there are none.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.sampling.spec import LANES, FilterSpec

THREADS, WARPS = 512, 16
DOWN = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.8, 1.1)
ROOM = 40               # 40 KiB of shared memory
DEEP = 4                # vectors of a thread that are loaded together
WIDE = 4                # elements of a vector
LISTED = 16             # elements of a lane that are loaded together for lists


def order_bits(kb: Kernel, bits: Value) -> Value:
    """float32 bits as u32 in the order of numbers."""
    sign, made = kb.reg("s32"), kb.reg("u32")
    kb.emit("shr.s32", sign, bits, 31)
    kb.emit("or.b32", sign, sign, -1 << 31)
    kb.emit("xor.b32", made, bits, sign)
    return made


class Sift:
    """Lists of a row's lanes. `logits` and `weights` are where the row begins."""

    def __init__(self, kb: Kernel, spec: FilterSpec) -> None:
        self.kb, self.spec = kb, spec
        self.keys = kb.shared("keys", 4 * LANES * ROOM)
        self.mass = kb.shared("mass", 4 * LANES * ROOM)
        self.counts = kb.shared("counts", 4 * LANES)
        self.scratch = [kb.shared(name, 4 * WARPS * count) for name, count in
                        (("first", 3), ("second", len(DOWN)), ("third", 1))]
        self.one = kb.reg("f32", 1.0)

    def of(self, logits: Value, weights: Value, target: Value) -> tuple[Value, Value]:
        """The floor, a key, and whether there are lists of what is above it; for all threads."""
        kb = self.kb
        floor = self.floor(logits, weights, target)
        with kb.if_(floor != 0): self.write_lists(logits, weights, floor)
        kb.sync()
        most = kb.reg("u32", ROOM + 1)
        at = self.counts.address((kb.tid.x & (LANES - 1)) * 4).at()
        kb.emit("ld.shared.u32", most, at, guard=floor != 0)
        (longest,) = self.of_block(["max.u32"], [most], 2)
        return floor, longest <= ROOM

    def floor(self, logits: Value, weights: Value, target: Value) -> Value:
        """The key of a floor, 0 for none."""
        kb = self.kb
        most, total, many = kb.reg("f32", -math.inf), kb.reg("f32", 0.0), kb.reg("f32", 0.0)
        for x, _, inside in self.row(logits, None):
            finite = (x > -math.inf) & inside
            kb.emit("max.f32", most, most, x, guard=finite)
            kb.emit("add.f32", total, total, x, guard=finite)
            kb.emit("add.f32", many, many, 1.0, guard=finite)
        most, total, many = self.of_block(["max.f32", "add.f32", "add.f32"], [most, total, many], 0)
        span = most - total / many
        edges = [most - span * down for down in DOWN]
        sums = kb.regs("f32", len(DOWN), 0.0)
        for x, weight, inside in self.row(logits, weights):
            for each, edge in zip(sums, edges, strict=True):
                kb.emit("add.f32", each, each, weight, guard=(x >= edge) & inside)
        sums = self.of_block(["add.f32"] * len(DOWN), sums, 1)
        floor, enough = kb.reg("u32", 0), target * 1.001
        for each, edge in reversed(list(zip(sums, edges, strict=True))):
            bits = kb.reg("b32")
            kb.emit("mov.b32", bits, edge)
            kb.emit("mov.u32", floor, order_bits(kb, bits), guard=each > enough)
        return floor

    def row(self, logits: Value, weights: Value | None) -> Iterator[tuple[Value, Value, Value]]:
        """A row's elements, shared out among all threads, their weights, and whether they are any; what uses
        them is written `DEEP` · `WIDE` times, in a loop."""
        kb, size = self.kb, self.spec.size
        wide = WIDE if size % WIDE == 0 else 1      # vectors are aligned and whole
        vector = f".v{wide}" if wide > 1 else ""
        with kb.loop(kb.tid.x * wide, size, THREADS * wide * DEEP, kind="u32") as i:
            at = [advance(kb, each, i, 4) for each in (logits, weights) if each is not None]
            inside = [i + THREADS * wide * d < size for d in range(DEEP)]
            loaded = [[kb.regs("f32", wide, 0.0) for _ in range(DEEP)] for _ in at]
            for vectors, base in zip(loaded, at, strict=True):
                for d, some in enumerate(vectors):
                    place = base.at(4 * THREADS * wide * d)
                    kb.emit(f"ld.global{vector}.f32", some if vector else some[0], place, guard=inside[d])
            for d in range(DEEP):
                for e in range(wide):
                    yield loaded[0][d][e], loaded[1][d][e] if len(at) > 1 else self.one, inside[d]

    def write_lists(self, logits: Value, weights: Value, floor: Value) -> None:
        """Writes the lists."""
        kb, spec = self.kb, self.spec
        warp, lane = kb.tid.x >> 5, kb.tid.x & 31
        with kb.loop(warp, LANES, WARPS, kind="u32") as number:
            start, here, kept = number * spec.length, kb.reg("s32"), kb.reg("u32", 0)
            kb.emit("sub.s32", here, spec.size, start)
            kb.emit("min.s32", here, here, spec.length)
            with kb.loop(0, here, 32 * LISTED, kind="s32") as j:
                first = start + (j.to("u32") + lane)
                at = advance(kb, logits, first, 4)
                words, rest = kb.regs("b32", LISTED, -1), here - j  # -1: the bits of key 0
                for d, x in enumerate(words):
                    kb.emit("ld.global.b32", x, at.at(128 * d), guard=(lane + 32 * d).to("s32") < rest)
                for d, x in enumerate(words):
                    self.add_elements(order_bits(kb, x), floor, number, kept, weights, first, d)
            kb.emit("st.shared.u32", self.counts.address(number * 4).at(), kept, guard=lane == 0)

    def add_elements(self, key: Value, floor: Value, number: Value, kept: Value, weights: Value,
                     first: Value, d: int) -> None:
        """32 elements that follow each other, to a lane's list as far as they are above the floor."""
        kb, votes, many, before = self.kb, self.kb.reg("b32"), self.kb.reg("u32"), self.kb.reg("u32")
        above = key >= floor
        kb.emit("vote.sync.ballot.b32", votes, above, -1)
        kb.emit("popc.b32", before, votes & kb.special("lanemask_lt"))
        kb.emit("popc.b32", many, votes)
        place = kept + before
        room = above & (place < ROOM)
        at = (place * LANES + number) * 4
        kb.emit("st.shared.u32", self.keys.address(at).at(), key, guard=room)
        weight = kb.reg("f32", 0.0)
        kb.emit("ld.global.f32", weight, advance(kb, weights, first, 4).at(128 * d), guard=room)
        kb.emit("st.shared.f32", self.mass.address(at).at(), weight, guard=room)
        kept += many

    def elements(self) -> Iterator[tuple[list[Value], list[Value]]]:
        """Keys and weights of the list of lane `tid.x`; what uses them is written once, in a loop."""
        kb, lane = self.kb, self.kb.tid.x
        count = kb.ld("shared", "u32", self.counts.address(lane * 4).at())[0]
        with kb.loop(0, count, kind="u32") as j:
            at = (j * LANES + lane) * 4
            key = kb.ld("shared", "u32", self.keys.address(at).at())
            yield key, kb.ld("shared", "f32", self.mass.address(at).at())

    def of_block(self, opcodes: Sequence[str], values: Sequence[Value], scratch: int) -> list[Value]:
        """Values of all threads put together, for all threads."""
        kb, space, made = self.kb, self.scratch[scratch], list[Value]()
        for i, (opcode, value) in enumerate(zip(opcodes, values, strict=True)):
            for lanes in (16, 8, 4, 2, 1):
                other, joined = kb.regs(value.kind, 2)
                kb.emit("shfl.sync.bfly.b32", other, value, lanes, 31, -1)
                kb.emit(opcode, joined, value, other)
                value = joined
            kb.emit("st.shared.b32", space.address((kb.tid.x >> 5) * 4).at(4 * WARPS * i), value,
                   guard=kb.tid.x & 31 == 0)
        kb.sync()
        for i, (opcode, value) in enumerate(zip(opcodes, values, strict=True)):
            total, *rest = (x for at in range(0, WARPS, 4)
                            for x in kb.ld("shared", value.kind, space.at(4 * (WARPS * i + at)), 4))
            for each in rest:
                joined = kb.reg(value.kind)
                kb.emit(opcode, joined, total, each)
                total = joined
            made.append(total)
        return made
