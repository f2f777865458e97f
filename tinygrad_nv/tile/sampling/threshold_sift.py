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
from tinygrad_nv.tile.access import advanced
from tinygrad_nv.tile.sampling.spec import LANES, FilterSpec

THREADS, WARPS = 512, 16
DOWN = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.8, 1.1)
ROOM = 40               # with weights 40 KiB of shared memory
DEEP = 4                # elements of a thread that are loaded together


def ordered(k: Kernel, bits: Value) -> Value:
    """float32 bits as u32 in the order of numbers."""
    sign, made = k.reg("s32"), k.reg("u32")
    k.emit("shr.s32", sign, bits, 31)
    k.emit("or.b32", sign, sign, -1 << 31)
    k.emit("xor.b32", made, bits, sign)
    return made


class Sift:
    """Lists of a row's lanes. `logits` and `weights` are where the row begins."""

    def __init__(self, k: Kernel, spec: FilterSpec) -> None:
        self.k, self.spec = k, spec
        self.keys = k.shared("keys", 4 * LANES * ROOM)
        self.mass = None if spec.counted else k.shared("mass", 4 * LANES * ROOM)
        self.counts = k.shared("counts", 4 * LANES)
        self.scratch = [k.shared(name, 4 * WARPS * count) for name, count in
                        (("first", 3), ("second", len(DOWN)), ("third", 1))]
        self.one = k.reg("f32", 1.0)

    def of(self, logits: Value, weights: Value | None, target: Value) -> tuple[Value, Value]:
        """The floor, a key, and whether there are lists of what is above it; for all threads."""
        k = self.k
        floor = self.floor(logits, weights, target)
        with k.if_(floor != 0): self.listed(logits, weights, floor)
        k.sync()
        most = k.reg("u32", ROOM + 1)
        at = self.counts.address((k.tid.x & (LANES - 1)) * 4).at()
        k.emit("ld.shared.u32", most, at, guard=floor != 0)
        (longest,) = self.of_block(["max.u32"], [most], 2)
        return floor, longest <= ROOM

    def floor(self, logits: Value, weights: Value | None, target: Value) -> Value:
        """The key of a floor, 0 for none."""
        k = self.k
        most, total, many = k.reg("f32", -math.inf), k.reg("f32", 0.0), k.reg("f32", 0.0)
        for x, _, inside in self.row(logits, None):
            finite = (x > -math.inf) & inside
            k.emit("max.f32", most, most, x, guard=finite)
            k.emit("add.f32", total, total, x, guard=finite)
            k.emit("add.f32", many, many, 1.0, guard=finite)
        most, total, many = self.of_block(["max.f32", "add.f32", "add.f32"], [most, total, many], 0)
        span = most - total / many
        edges = [most - span * down for down in DOWN]
        sums = k.regs("f32", len(DOWN), 0.0)
        for x, weight, inside in self.row(logits, weights):
            for each, edge in zip(sums, edges, strict=True):
                k.emit("add.f32", each, each, weight, guard=(x >= edge) & inside)
        sums = self.of_block(["add.f32"] * len(DOWN), sums, 1)
        floor, enough = k.reg("u32", 0), target * 1.001
        for each, edge in reversed(list(zip(sums, edges, strict=True))):
            bits = k.reg("b32")
            k.emit("mov.b32", bits, edge)
            k.emit("mov.u32", floor, ordered(k, bits), guard=each > enough)
        return floor

    def row(self, logits: Value, weights: Value | None) -> Iterator[tuple[Value, Value, Value]]:
        """A row's elements, shared out among all threads, their weights, and whether they are any; what uses
        them is written `DEEP` times, in a loop."""
        k, size = self.k, self.spec.size
        with k.loop(k.tid.x, size, THREADS * DEEP, kind="u32") as i:
            at = [advanced(k, each, i, 4) for each in (logits, weights) if each is not None]
            inside = [i + THREADS * d < size for d in range(DEEP)]
            loaded = [k.regs("f32", DEEP, 0.0) for _ in at]
            for registers, base in zip(loaded, at, strict=True):
                for d, x in enumerate(registers):
                    k.emit("ld.global.f32", x, base.at(4 * THREADS * d), guard=inside[d])
            for d in range(DEEP): yield loaded[0][d], loaded[1][d] if len(at) > 1 else self.one, inside[d]

    def listed(self, logits: Value, weights: Value | None, floor: Value) -> None:
        """Writes the lists."""
        k, spec = self.k, self.spec
        warp, lane = k.tid.x >> 5, k.tid.x & 31
        with k.loop(warp, LANES, WARPS, kind="u32") as number:
            start, here, kept = number * spec.length, k.reg("s32"), k.reg("u32", 0)
            k.emit("sub.s32", here, spec.size, start)
            k.emit("min.s32", here, here, spec.length)
            with k.loop(0, here, 32 * DEEP, kind="s32") as j:
                first = start + (j.to("u32") + lane)
                at = advanced(k, logits, first, 4)
                words, rest = k.regs("b32", DEEP, -1), here - j  # -1: the bits of key 0
                for d, x in enumerate(words):
                    k.emit("ld.global.b32", x, at.at(128 * d), guard=(lane + 32 * d).to("s32") < rest)
                for d, x in enumerate(words):
                    self.added(ordered(k, x), floor, number, kept, weights, first, d)
            k.emit("st.shared.u32", self.counts.address(number * 4).at(), kept, guard=lane == 0)

    def added(self, key: Value, floor: Value, number: Value, kept: Value, weights: Value | None, first: Value,
              d: int) -> None:
        """32 elements that follow each other, to a lane's list as far as they are above the floor."""
        k, votes, many, before = self.k, self.k.reg("b32"), self.k.reg("u32"), self.k.reg("u32")
        above = key >= floor
        k.emit("vote.sync.ballot.b32", votes, above, -1)
        k.emit("popc.b32", before, votes & k.special("lanemask_lt"))
        k.emit("popc.b32", many, votes)
        place = kept + before
        room = above & (place < ROOM)
        at = (place * LANES + number) * 4
        k.emit("st.shared.u32", self.keys.address(at).at(), key, guard=room)
        if self.mass is not None and weights is not None:
            weight = k.reg("f32", 0.0)
            k.emit("ld.global.f32", weight, advanced(k, weights, first, 4).at(128 * d), guard=room)
            k.emit("st.shared.f32", self.mass.address(at).at(), weight, guard=room)
        kept += many

    def elements(self) -> Iterator[tuple[list[Value], list[Value]]]:
        """Keys and weights of the list of lane `tid.x`; what uses them is written once, in a loop."""
        k, lane = self.k, self.k.tid.x
        count = k.ld("shared", "u32", self.counts.address(lane * 4).at())[0]
        with k.loop(0, count, kind="u32") as j:
            at = (j * LANES + lane) * 4
            key = k.ld("shared", "u32", self.keys.address(at).at())
            yield key, [self.one] if self.mass is None else k.ld("shared", "f32", self.mass.address(at).at())

    def of_block(self, opcodes: Sequence[str], values: Sequence[Value], scratch: int) -> list[Value]:
        """Values of all threads put together, for all threads."""
        k, space, made = self.k, self.scratch[scratch], list[Value]()
        for i, (opcode, value) in enumerate(zip(opcodes, values, strict=True)):
            for lanes in (16, 8, 4, 2, 1):
                other, joined = k.regs(value.kind, 2)
                k.emit("shfl.sync.bfly.b32", other, value, lanes, 31, -1)
                k.emit(opcode, joined, value, other)
                value = joined
            k.emit("st.shared.b32", space.address((k.tid.x >> 5) * 4).at(4 * WARPS * i), value,
                   guard=k.tid.x & 31 == 0)
        k.sync()
        for i, (opcode, value) in enumerate(zip(opcodes, values, strict=True)):
            total, *rest = (x for at in range(0, WARPS, 4)
                            for x in k.ld("shared", value.kind, space.at(4 * (WARPS * i + at)), 4))
            for each in rest:
                joined = k.reg(value.kind)
                k.emit(opcode, joined, total, each)
                total = joined
            made.append(total)
        return made
