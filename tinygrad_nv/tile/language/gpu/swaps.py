"""Wider vectors of a tile within a warp: bits of the lane change places with bits of the register's number.

Protocol: an accumulator has two columns side by side in a thread and eight in four lanes. Exchanging a lane's
bit with a register's bit by shuffles, half of the registers each, doubles the vector: no shared memory, no
barrier. For tiles of 16-bit floats, whose pairs are words, and whose extents are powers of two.

An exchange with the thread whose number differs in one bit is by shuffles for bits of the lane, by way of
shared memory for those of the warp. Elements go as words of 32 bits.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Value
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes
from tinygrad_nv.tile.language.gpu.convert import Writer, address, convert_layout
from tinygrad_nv.tile.language.gpu.held import Held, Part, from_words, words
from tinygrad_nv.tile.language.gpu.layout import LANE_BITS, Layout, extents

FULL = -1           # all lanes of a warp
SEGMENT = 31        # the whole warp


@dataclass(frozen=True)
class Swaps:
    """Pairs of a lane's bit, by its place, and the index's bit that a register has instead; the layout that
    they give."""
    pairs: tuple[tuple[int, int], ...]
    layout: Layout


def lanes_along(layout: Layout, along: range, vector: int) -> int:
    """Elements side by side along an axis that the lanes of a warp hold, `vector` in each."""
    count = vector
    for bit in along[vector.bit_length() - 1:]:
        if bit not in layout.threads[:LANE_BITS]: break
        count *= 2
    return count


def plan_swaps(held: Held, vector: int) -> Swaps | None:
    """How a tile comes to vectors along its last axis; None where it cannot within a warp."""
    layout, of = held.layout, extents(held.shape)
    along = of.of_axis(len(held.shape) - 1)
    wanted = along[:vector.bit_length() - 1]
    if held.dtype not in FLOAT16S or not of.exact or layout.count < 4 or layout.registers[0] != along[0] or \
            len(wanted) < vector.bit_length() - 1: return None
    registers, threads, pairs = list(layout.registers), list(layout.threads), list[tuple[int, int]]()
    for bit in wanted:
        if bit in registers: continue
        lane = threads.index(bit)
        spare = sorted(each for each in registers[1:] if each not in wanted)
        if lane >= LANE_BITS or not spare: return None
        pairs.append((lane, spare[0]))
        registers[registers.index(spare[0])], threads[lane] = bit, spare[0]
    order = (*wanted, *(bit for bit in registers if bit not in wanted))
    return Swaps(tuple(pairs), Layout(order, tuple(threads)))


def swap_registers(writer: Writer, held: Held, swaps: Swaps) -> Held:
    """The tile in the layout of `swaps`."""
    registers, threads = list(held.layout.registers), list(held.layout.threads)
    words = [part.pair() for part in held.parts if part is not None]
    for lane, bit in swaps.pairs:
        place, upper = registers.index(bit), writer.threads.bit(lane)
        _exchange(writer, words, 1 << place - 1, 1 << lane, upper)
        registers[place], threads[lane] = threads[lane], bit
    made = [Lanes(writer.kb, held.dtype, [], word) for word in words]
    return convert_layout(writer, Held(held.dtype, held.shape, Layout(tuple(registers), tuple(threads)),
                                         list(made)), swaps.layout)


def _exchange(writer: Writer, words: list[Value], distance: int, lane: int, upper: Value) -> None:
    """Exchanges two registers: the lower lane keeps the first and sends the second, the upper one the other
    way."""
    kb = writer.kb
    for first in range(len(words)):
        if first & distance: continue
        low, high = words[first], words[first | distance]
        found = kb.reg("b32")
        kb.emit("shfl.sync.bfly.b32", found, kb.select(upper, low, high, "b32"), lane, SEGMENT, FULL)
        words[first], words[first | distance] = (kb.select(upper, found, low, "b32"),
                                                 kb.select(upper, high, found, "b32"))


def exchange_parts(writer: Writer, parts: Sequence[Part], at: int) -> list[Part]:
    """Single elements of the thread across bit `at`; equal ones once."""
    known: dict[int, Part] = {id(None): None}
    distinct = [part for part in {id(each): each for each in parts}.values() if part is not None]
    across = _shuffle_parts if at < LANE_BITS else _by_shared
    for part, found in zip(distinct, across(writer, distinct, at), strict=True): known[id(part)] = found
    return [known[id(part)] for part in parts]


def _shuffle_parts(writer: Writer, parts: Sequence[Lanes], at: int) -> list[Lanes]:
    return [from_words(part.kb, part.dtype,
                       [shuffle_word(part, word, at) for word in words(part.kb, part, 1)], 1)
            for part in parts]


def shuffle_word(part: Lanes, word: Value, at: int) -> Value:
    """A word of the lane across bit `at`."""
    made = part.kb.reg(word.kind)
    part.kb.emit("shfl.sync.bfly.b32", made, word, 1 << at, SEGMENT, FULL)
    return made


def _by_shared(writer: Writer, parts: Sequence[Lanes], at: int) -> list[Lanes]:
    kb, arena, span = writer.kb, writer.arena, 4 << writer.threads.bits
    nbytes = span * len(parts)
    made: list[Lanes] = []
    with arena.scratch(nbytes) as start:
        own = address(writer, start, writer.threads.sum([(i, 4 << i) for i in range(writer.threads.bits)]))
        arena.writes(start, nbytes)
        for i, part in enumerate(parts):
            (word,) = words(kb, part, 1)
            kb.st("shared", "b32", own.at(i * span), word)
        other = kb.reg("u32")
        kb.emit("add.u32", other, own, kb.select(writer.threads.bit(at), -(4 << at), 4 << at, "s32"))
        arena.reads(start, nbytes)
        for i, part in enumerate(parts):
            (like,) = words(kb, part, 1)
            word = kb.reg(like.kind)
            kb.emit("ld.shared.b32", word, other.at(i * span))
            made.append(from_words(kb, part.dtype, [word], 1))
    return made
