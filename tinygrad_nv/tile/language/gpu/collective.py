"""Reductions and scans along an axis.

Protocol: the bits of an axis are registers', lanes' and warps'. A reduction by a row of the table combines
registers, then lanes by butterflies, then warps through shared memory, always in the same order: its bits do
not depend on a run. One by a function of the user's, and every scan, takes the bits of the axis from the
lowest on, so that what is combined first is always the earlier of two neighbours: it has to be associative,
no more. What lies beyond an extent that is no power of two takes no part. Integers of 32 bits that lie among
all lanes of a warp are combined by one instruction (redux).

A scan keeps, beside each partial result x, the total t of the 2^b elements of its block so far (Sklansky
1960):

    bit b is 0 of the earlier block (x, t) and 1 of the later one (x', t'):
        x' = combine(t, x');  t = t' = combine(t, t')
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Lanes, kind_of
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.access import fetch, store
from tinygrad_nv.tile.language.gpu.convert import address
from tinygrad_nv.tile.language.gpu.held import Held, Part, copy_part, map_parts
from tinygrad_nv.tile.language.gpu.indices import find_choice, first_indices
from tinygrad_nv.tile.language.gpu.layout import LANE_BITS, Layout, absent, axes_with_padding, extents
from tinygrad_nv.tile.language.gpu.shares import are_many, combine_shares
from tinygrad_nv.tile.language.gpu.swaps import exchange_parts
from tinygrad_nv.tile.language.gpu.values import Values
from tinygrad_nv.tile.language.ir import Op, Region

KINDS = {dtypes.float32: "f32", dtypes.int32: "s32"}
MANY_WARPS = 4          # bits of their number: of so many, 16, each lane reads one's word
MOST_AT_ONCE = 32       # totals of warps that a thread of a scan adds up
REDUX, REDUCED = ("add", "max", "min", "and", "or", "xor"), (dtypes.int32, dtypes.uint32)
Elements = list[Part]                       # single elements, by register
Combine = Callable[[Sequence[Part], Sequence[Part]], list[Part]]    # of operands: earlier, later


def neutral(fn: str, dtype: DType) -> float:
    """The number that a row of the table leaves out of account."""
    if fn in ("max", "min") and dtype == dtypes.bool: return fn == "min"
    if fn in ("max", "min"):
        if dtypes.is_float(dtype): return -math.inf if fn == "max" else math.inf
        bits, unsigned = 8 * dtype.itemsize, dtypes.is_unsigned(dtype)
        if fn == "max": return 0 if unsigned else -(1 << bits - 1)
        return (1 << bits) - 1 if unsigned else (1 << bits - 1) - 1
    return {"add": 0, "mul": 1, "or": 0, "xor": 0, "and": -1}[fn]


class Collective(Values):
    """Reductions and scans. `partial`: reductions of which each thread keeps its own part (control.py).
    `arrived`: operations across the cluster that are written, of `acrosses`."""
    partial: set[Op]
    arrived: list[Op]
    acrosses: int

    def do_across(self, op: Op) -> None:
        """A number of all CTAs of a cluster, through the shared memory of each."""
        assert op in self.program.body.ops, "one that all programs of the cluster come to, once"
        kb, dtype, value = self.kb, op.result.dtype, self.number(op.operands[0])
        kind, found = KINDS[dtype], kb.shared(f"across{len(self.arrived)}", 4).address()
        self.arrived.append(op)
        kb.emit("st.shared.b32", found.at(), value, guard=kb.tid.x == 0)
        kb.cluster_arrive()
        kb.cluster_wait()
        each = kb.regs(kind, self.program.cluster)
        for rank, one in enumerate(each):
            kb.emit(f"ld.shared::cluster.{kind}", one, kb.mapa(found, rank).at())
        for one in each[1:]: kb.emit(f"{op.attributes['fn']}.{kind}", each[0], each[0], one)
        self.put_scalar(op.result, Lanes(kb, dtype, [each[0]]))
        if len(self.arrived) == self.acrosses: kb.cluster_arrive()   # waited for at the kernel's end

    def singles(self, held: Held) -> Elements:
        """Each register's element alone; equal elements of a pair are one."""
        made: Elements = []
        for part in held.parts:
            if part is None: made += [None] * held.width
            elif held.width == 1 or len(part.each()) == 1:
                one = part if held.width == 1 else Lanes(self.kb, part.dtype, [part.at(0)])
                made += [one] * held.width
            else: made += [Lanes(self.kb, part.dtype, [part.at(i)]) for i in range(2)]
        return made

    def from_singles(self, dtype: DType, shape: tuple[int, ...], layout: Layout, each: Elements) -> Held:
        """The tile of single elements."""
        return Held(dtype, shape, layout, self.parts(dtype, shape, layout, [None if one is None else one.at(0)
                                                                            for one in each]))

    # **** combining ****

    def combiner(self, op: Op) -> Combine:
        """A row of the table, or the user's function, of elements; once for equal ones."""
        known: dict[tuple[int, ...], list[Part]] = {}
        kept: list[object] = []     # a key is good as long as its elements live

        def combine(a: Sequence[Part], b: Sequence[Part]) -> list[Part]:
            if any(each is None for each in b): return list(a)
            if any(each is None for each in a): return list(b)
            key = tuple(map(id, (*a, *b)))
            if key not in known:
                kept.extend((*a, *b))
                known[key] = self._combine_parts(op, [*a, *b])
            return known[key]
        return combine

    def _combine_parts(self, op: Op, given: Sequence[Part]) -> list[Part]:
        parts = [each for each in given if each is not None]
        if op.regions: return list(self.inline(op.regions[0], parts))
        return [elements.apply_row(self.kb, op.attributes["fn"], parts)]

    def inline(self, region: Region, given: Sequence[Lanes]) -> list[Lanes]:
        """Returns what a region of scalars makes of scalars."""
        self.scopes.push()
        for argument, part in zip(region.arguments, given, strict=True):
            self.put_scalar(argument, copy_part(part))
        self.region(region)
        made = [self.scalar(each) for each in region.yields]
        self.scopes.pop()
        return made

    def _mask_padding(self, op: Op, held: Held, each: Elements, axis: int) -> Elements:
        """Elements beyond an axis as the neutral one."""
        if axis not in axes_with_padding(held.shape): return each
        other = elements.constant(self.kb, neutral(op.attributes["fn"], held.dtype), held.dtype)
        made: Elements = []
        for register, one in enumerate(each):
            test = self.inside(held.layout, held.shape, register, (axis,))
            made.append(one if one is None or test is None else elements.apply_row(
                self.kb, "where", [Lanes(self.kb, dtypes.bool, [test]), one, other]))
        return made

    # **** reductions ****

    def do_reduce(self, op: Op) -> None:
        axis = op.attributes["axis"]
        helds = [self.value(each, self.assignment.layout(op.operands[0])) for each in op.operands]
        layout, shape = helds[0].layout, helds[0].shape
        bits = extents(shape).of_axis(axis)
        if op.regions: found = self._scan_in_order(op, helds, axis, False)[1]
        else: found = [self._reduce_axis(op, helds[0], axis)]
        places = [i for i, index in enumerate(layout.indices) if not any(index >> bit & 1 for bit in bits)]
        left = layout.without(bits)
        for result, each in zip(op.results, found, strict=True):
            one = [each[i] for i in places]
            if not result.shape:
                assert one[0] is not None
                self.put_scalar(result, one[0])
            else: self.put_held(result, self.from_singles(result.dtype, result.shape, left, one))

    def _reduce_axis(self, op: Op, held: Held, axis: int) -> Elements:
        """Reduces by a row of the table."""
        combine, layout, bits = self.combiner(op), held.layout, extents(held.shape).of_axis(axis)
        each: Elements = self.singles(held)
        if (choice := find_choice(self, op)) is not None:
            for register, least in first_indices(self, choice, held, axis).items(): each[register] = least
        else: self._reduce_registers(combine, layout, bits, each := self._mask_padding(op, held, each, axis))
        places = [i for i, index in enumerate(layout.indices) if not any(index >> bit & 1 for bit in bits)]
        some = [each[i] for i in places]
        if op not in self.partial:
            some = self.across_threads(combine, layout, some, bits, held.dtype, op.attributes["fn"])
        for place, one in zip(places, some, strict=True): each[place] = one
        return each

    def _reduce_registers(self, combine: Combine, layout: Layout, bits: range, each: Elements) -> None:
        """Combines a thread's own elements."""
        for bit in reversed([bit for bit in layout.registers if bit in bits]):
            for register, index in enumerate(layout.indices):
                if index >> bit & 1 or any(index >> other & 1 for other in bits if other > bit): continue
                each[register] = combine([each[register]], [each[layout.numbers[index | 1 << bit]]])[0]

    def across_threads(self, combine: Combine, layout: Layout, some: Elements, bits: Sequence[int],
                       dtype: DType, fn: str) -> Elements:
        """Partial results of threads, combined by those among which bits of a layout lie."""
        over = [at for at, _ in layout.thread_bits(bits)]
        redux = over[:LANE_BITS] == list(range(LANE_BITS)) and fn in REDUX and dtype in REDUCED
        warps = [at for at in over if at >= LANE_BITS]
        if warps and not redux and are_many(some, 1 << len(warps), dtype):
            return combine_shares(self, combine, layout, some, over, dtype)
        some = self._by_redux(some, fn) if redux else self._by_butterflies(combine, some, over)
        read = partial(self._by_lanes, fn) if redux and len(warps) >= MANY_WARPS else self._over_places
        return self._across_warps(combine, layout, some, over, warps, dtype, read) if warps else some

    def _by_butterflies(self, combine: Combine, some: Elements, over: Sequence[int]) -> Elements:
        for at in over:
            if at < LANE_BITS:
                some = [combine([a], [b])[0] for a,
                        b in zip(some, exchange_parts(self, some, at), strict=True)]
        return some

    def _by_redux(self, some: Elements, fn: str) -> Elements:
        """Integers of all lanes, by one instruction."""
        def whole(part: Lanes) -> Lanes:
            made = self.kb.reg(kind_of(part.dtype))
            kind = "b32" if fn in ("and", "or", "xor") else kind_of(part.dtype)
            self.kb.emit(f"redux.sync.{fn}.{kind}", made, part.register(), -1)
            return Lanes(self.kb, part.dtype, [made])
        return map_parts(whole, some)

    def _across_warps(self, combine: Combine, layout: Layout, some: Elements, over: Sequence[int],
                      warps: Sequence[int], dtype: DType, read: Callable[..., Elements]) -> Elements:
        """Partial results of warps, combined by all of them in the order of the warps."""
        known: dict[int, Part] = {id(None): None}
        for key, found in self._share_over_warps(layout, some, over, warps, dtype, read).items():
            while len(found) > 1:
                found = [combine([a], [b])[0] for a, b in zip(found[::2], found[1::2], strict=True)]
            known[key] = found[0]
        return [known[id(part)] for part in some]

    def _share_over_warps(self, layout: Layout, some: Elements, over: Sequence[int], warps: Sequence[int],
                          dtype: DType, read: Callable[..., Elements]) -> dict[int, Elements]:
        """The partial results of all warps, in their order, of each of these; by the ids of a warp's own."""
        kb, arena, size = self.kb, self.arena, dtype.itemsize
        count = 1 << len(warps)
        others = [at for at in range(self.threads.bits) if at not in over and not layout.copies >> at & 1]
        slots = count << len(others)
        distinct = [part for part in {id(each): each for each in some}.values() if part is not None]
        nbytes = len(distinct) * slots * size
        # what lanes hold different elements of lies side by side, else what warps do
        apart = any(at < LANE_BITS for at in others)
        step, pitch = (size << len(others), size) if apart else (size, count * size)
        pairs = [(at, pitch << i) for i, at in enumerate(others)]
        mine = self.threads.first(layout.copies | sum(1 << at for at in over if at not in warps))
        known: dict[int, Elements] = {}
        with arena.scratch(nbytes) as start:
            arena.writes(start, nbytes)
            own = address(self, start,
                          self.threads.sum([*pairs, *((at, step << i) for i, at in enumerate(warps))]))
            for i, part in enumerate(distinct): store(kb, own, i * slots * size, [part], 1, mine, "shared")
            arena.reads(start, nbytes)
            base = address(self, start, self.threads.sum(pairs))
            for i, part in enumerate(distinct):
                known[id(part)] = read(base, i * slots * size, step, dtype, count)
        return known

    def _over_places(self, base: Register, nbytes: int, step: int, dtype: DType, count: int) -> Elements:
        """So many elements of shared memory, `step` bytes from one to the next."""
        at_once = min(count, 16 // dtype.itemsize) if step == dtype.itemsize else 1
        made: Elements = []
        for first in range(0, count, at_once):
            parts = fetch(self.kb, base, nbytes + first * step, dtype, at_once, space="shared")
            made += [Lanes(self.kb, dtype, [part.at(i)]) for part in parts for i in range(min(at_once, 2))]
        return made

    def _by_lanes(self, fn: str, base: Register, nbytes: int, step: int, dtype: DType,
                  count: int) -> Elements:
        """The same, combined: each lane reads a word, and one instruction combines those of all lanes."""
        own = self.kb.reg("u32")
        self.kb.emit("add.u32", own, base, self.threads.sum([(at, step << at) for at in range(LANE_BITS)]))
        there = self.threads.first((1 << LANE_BITS) - 1 & -count)
        found = fetch(self.kb, own, nbytes, dtype, 1, there, neutral(fn, dtype), "shared")
        return self._by_redux([*found], fn)

    # **** in order ****

    def _scan_in_order(self, op: Op, helds: Sequence[Held], axis: int,
                 back: bool) -> tuple[list[Elements], list[Elements]]:
        """Returns partial results and totals of each operand; `back`: from the last element on."""
        combine, layout, shape = self.combiner(op), helds[0].layout, helds[0].shape
        state = [self.singles(held) for held in helds]
        totals = [list(each) for each in state]
        every = op.name == "scan"
        bits = list(extents(shape).of_axis(axis))
        over = [at for at, bit in sorted(layout.thread_bits(bits), key=lambda pair: pair[1])]
        warps = [at for at in over if at >= LANE_BITS]
        at_once = every and not op.regions and not back and len(warps) > 1 and \
            {layout.threads[at] for at in warps} == set(bits[-len(warps):]) and \
            len({id(each) for each in totals[0] if each is not None}) << len(warps) <= MOST_AT_ONCE
        for bit in bits[:-len(warps)] if at_once else bits:
            step = self._register_step if bit in layout.registers else partial(self._thread_step,
                                                                               bool(op.regions))
            step(combine, layout, shape, axis, bit, back, state if every else None, totals)
        if at_once: state = [self._after_warps(op, combine, layout, state[0], totals[0], over, warps,
                                               helds[0].dtype)]
        return state, totals

    def _after_warps(self, op: Op, combine: Combine, layout: Layout, state: Elements, totals: Elements,
                     over: Sequence[int], warps: Sequence[int], dtype: DType) -> Elements:
        """Partial results of warps with the totals of the warps before."""
        shared = self._share_over_warps(layout, totals, over, warps, dtype, self._over_places)
        place = self.threads.sum([(at, 1 << i) for i, at in enumerate(warps)])
        assert not isinstance(place, int)
        known: dict[int, Part] = {id(None): None}
        for key, found in shared.items():
            before = found[0]
            for number, one in enumerate(found[1:-1], 1):
                before = self._if(place > number, combine([before], [one]), [before])[0]
            known[key] = before
        first = place == 0
        nothing = elements.constant(self.kb, neutral(op.attributes["fn"], dtype), dtype)
        if exact := dtype in REDUCED:
            known = {key: None if one is None else self._if(first, [nothing], [one])[0]
                     for key, one in known.items()}
        made = [None if x is None else combine([known[id(total)]], [x])[0]
                for x, total in zip(state, totals, strict=True)]
        if exact: return made
        return [None if x is None else self._if(first, [x], [one])[0]
                for x, one in zip(state, made, strict=True)]

    def _register_step(self, combine: Combine, layout: Layout, shape: tuple[int, ...], axis: int, bit: int,
                       back: bool, state: list[Elements] | None, totals: list[Elements]) -> None:
        for low, index in enumerate(layout.indices):
            if index >> bit & 1: continue
            high = layout.numbers[index | 1 << bit]
            first, second = (high, low) if back else (low, high)
            a, b = ([each[i] for each in totals] for i in (first, second))
            test = self._there(layout, shape, axis, bit, index | 1 << bit)
            if state is not None:
                x = [each[second] for each in state]
                made = combine(a, x)
                if back: made = self._if(test, made, x)
                for each, one in zip(state, made, strict=True): each[second] = one
            total = combine(a, b)
            total = self._if(test, total, b if back else a)
            for each, one in zip(totals, total, strict=True): each[low] = each[high] = one

    def _thread_step(self, ordered: bool, combine: Combine, layout: Layout, shape: tuple[int, ...],
                     axis: int, bit: int, back: bool, state: list[Elements] | None,
                     totals: list[Elements]) -> None:
        at = next(at for at, one in layout.thread_bits([bit]) if one == bit)
        others = [exchange_parts(self, each, at) for each in totals]
        later = Lanes(self.kb, dtypes.bool, [self.threads.bit(at)])
        if back:
            later = elements.apply_row(self.kb, "xor", [later, elements.constant(self.kb, True, dtypes.bool)])
        known: dict[tuple[int, ...], list[Part]] = {}
        for register, index in enumerate(layout.indices):
            mine, other = [each[register] for each in totals], [each[register] for each in others]
            if mine[0] is None: continue
            test = self._there(layout, shape, axis, bit, index | 1 << bit)
            if state is not None:
                x = [each[register] for each in state]
                made = self._if(later.register(), combine(other, x), x)
                if back: made = self._if(test, made, x)
                for each, one in zip(state, made, strict=True): each[register] = one
            key = tuple(map(id, (*mine, *other)))
            if key not in known:
                a, b = mine, other
                if ordered or test is not None:
                    a, b = self._if(later.register(), b, a), self._if(later.register(), a, b)
                known[key] = self._if(test, combine(a, b), b if back else a)
            for each, one in zip(totals, known[key], strict=True): each[register] = one

    def _there(self, layout: Layout, shape: tuple[int, ...], axis: int, bit: int,
               index: int) -> Register | bool | None:
        """Whether the later block of a pair, of 2^bit elements, has any inside; None where all have."""
        of = extents(shape)
        if axis not in axes_with_padding(shape): return None
        below = (1 << bit - of.first[axis]) - 1
        first = of.coordinate(index, axis) & ~below
        bits = [each for each in of.of_axis(axis) if each > bit]
        own = self.threads.sum([(at, 1 << each - of.first[axis]) for at, each in layout.thread_bits(bits)])
        if isinstance(own, int): return first < shape[axis]
        return own < shape[axis] - first

    def _if(self, test: Register | bool | None, yes: Sequence[Part], no: Sequence[Part]) -> list[Part]:
        """One or the other of elements."""
        if test is None or isinstance(test, bool): return list(no if test is False else yes)
        choice = Lanes(self.kb, dtypes.bool, [test])
        return [a if b is None or a is b else b if a is None
                else elements.apply_row(self.kb, "where", [choice, a, b])
                for a, b in zip(yes, no, strict=True)]

    def do_scan(self, op: Op) -> None:
        layout = self.assignment.layout(op.results[0])
        helds = [self.value(each, layout) for each in op.operands]
        state, _ = self._scan_in_order(op, helds, op.attributes["axis"], op.attributes["reverse"])
        gone = absent(layout, helds[0].shape)
        for result, each in zip(op.results, state, strict=True):
            some = [None if out else one for one, out in zip(each, gone, strict=True)]
            self.put_held(result, self.from_singles(result.dtype, result.shape, layout, some))


