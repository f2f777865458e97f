"""Partial results of threads, combined by a share of them for each.

Protocol: where a reduction leaves many numbers in each thread, those of one column say, each thread combines
some of them: lanes that meet exchange halves, so that after each step they have half as many; warps leave
what they have in shared memory, where each word is read once, and all read what the others have made of it.
The order is that of butterflies and of the warps, as where every thread combines all of them.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.language.gpu.access import fetch, store
from tinygrad_nv.tile.language.gpu.convert import Writer, address
from tinygrad_nv.tile.language.gpu.elements import apply_row
from tinygrad_nv.tile.language.gpu.held import Part
from tinygrad_nv.tile.language.gpu.layout import LANE_BITS, Layout
from tinygrad_nv.tile.language.gpu.swaps import exchange_parts

WORD, VECTOR = 4, 4     # bytes of an element; elements that a thread reads at once
MANY = 64               # words of shared memory that a thread would read: below, a barrier costs more


def are_many(parts: Sequence[Part], warps: int, dtype: DType) -> bool:
    """Whether parts of so many warps are worth a share for each thread."""
    return dtype.itemsize == WORD and len({id(each) for each in parts if each is not None}) * warps >= MANY


def combine_shares(writer: Writer, combine: Callable[..., list[Part]], layout: Layout, parts: Sequence[Part],
                   over: Sequence[int], dtype: DType) -> list[Part]:
    """Parts of all threads that differ in the bits `over` of their number, combined."""
    kb, arena, threads = writer.kb, writer.arena, writer.threads
    others = [at for at in range(threads.bits) if at not in over and not layout.copies >> at & 1]
    distinct = [part for part in {id(each): each for each in parts}.values() if part is not None]
    lanes, warps = ([at for at in over if (at < LANE_BITS) == low] for low in (True, False))
    kept, beside, count = -(-len(distinct) // (1 << len(lanes))), WORD << len(others), 1 << len(warps)
    held = [*distinct, *[distinct[-1]] * ((kept << len(lanes)) - len(distinct))]
    step = beside * (count + 1)                     # the next part is in other banks
    row = WORD * VECTOR * (-(-len(distinct) // VECTOR) | 1)     # so is the next thread's vector
    first, shares = threads.first(layout.copies), 1 << len(over)
    mine, nbytes = [(at, kept * step << i) for i, at in enumerate(reversed(lanes))], len(held) * step
    for at in lanes: held = exchange_halves(writer, combine, held, at)
    with arena.scratch(nbytes) as start, arena.scratch(row << len(others)) as end:
        arena.writes(start, nbytes)
        own = [(at, WORD << i) for i, at in enumerate(others)]
        mine += [(at, beside << i) for i, at in enumerate(warps)]
        base = address(writer, start, threads.sum([*own, *mine]))
        for i, part in enumerate(held): store(kb, base, i * step, [part], 1, first, "shared")
        arena.reads(start, nbytes)
        arena.writes(end, row << len(others))
        rank = threads.sum([(at, 1 << i) for i, at in enumerate(over)])
        assert not isinstance(rank, int)
        base = address(writer, start, threads.sum([*own, *((at, step << i) for i, at in enumerate(over))]))
        rows = [(at, row << i) for i, at in enumerate(others)]
        to = address(writer, end, threads.sum([*rows, *((at, WORD << i) for i, at in enumerate(over))]))
        for number in range(0, len(distinct), shares):
            there = None if number + shares <= len(distinct) else rank < len(distinct) - number
            found: list[Part] = []
            for i in range(count):
                found += fetch(kb, base, number * step + i * beside, dtype, 1, there, space="shared")
            while len(found) > 1:
                found = [combine([a], [b])[0] for a, b in zip(found[::2], found[1::2], strict=True)]
            guard = there if first is None else first if there is None else first & there
            assert found[0] is not None
            store(kb, to, number * WORD, [found[0]], 1, guard, "shared")
        arena.reads(end, row << len(others))
        base, made = address(writer, end, threads.sum(rows)), list[Part]()
        whole = len(distinct) // VECTOR * VECTOR
        for number in [*range(0, whole, VECTOR), *range(whole, len(distinct))]:
            some = fetch(kb, base, number * WORD, dtype, VECTOR if number < whole else 1, space="shared")
            made += [Lanes(kb, dtype, [each]) for part in some for each in part.each()]
    known = {id(part): one for part, one in zip(distinct, made, strict=True)}
    return [None if part is None else known[id(part)] for part in parts]


def exchange_halves(writer: Writer, combine: Callable[..., list[Part]], parts: Sequence[Lanes],
                    at: int) -> list[Lanes]:
    """Half of the parts, combined with those of the lane that differs in a bit: the first half where it is 0,
    else the second."""
    bit, half = Lanes(writer.kb, dtypes.bool, [writer.threads.bit(at)]), len(parts) // 2
    pairs = list(zip(parts[:half], parts[half:], strict=True))
    given = [apply_row(writer.kb, "where", [bit, a, b]) for a, b in pairs]
    found = exchange_parts(writer, given, at)
    made = [combine([apply_row(writer.kb, "where", [bit, b, a])], [other])[0]
            for (a, b), other in zip(pairs, found, strict=True)]
    return [each for each in made if each is not None]
