"""Exchange with the thread whose number differs in one bit.

Protocol: bits of the lane by shuffles, those of the warp by way of shared memory. Elements go as words of 32
bits.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Value
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.language.gpu.convert import Writer, address
from tinygrad_nv.tile.language.gpu.held import Part, from_words, words
from tinygrad_nv.tile.language.gpu.layout import LANE_BITS

FULL = -1           # all lanes of a warp
SEGMENT = 31        # the whole warp


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
