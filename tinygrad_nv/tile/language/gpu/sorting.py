"""Sorts and gathers along an axis.

Protocol: a sort is bitonic (Batcher 1968): for each block size 2^s, elements 2^j apart for j = s - 1 … 0 are
put in order, ascending where bit s of the index is 0, so that the last blocks ascend throughout. What lies
beyond an extent that is no power of two counts as the largest, and so comes last. A gather along an axis that
lies in the registers and lanes of a warp reads the registers of other lanes, where these are few (`_Lookup`);
any other reads its elements from shared memory, where the whole tile lies.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.access import fetch
from tinygrad_nv.tile.language.gpu.collective import Elements, neutral
from tinygrad_nv.tile.language.gpu.convert import SharedOrder, address, pair_parts, spill
from tinygrad_nv.tile.language.gpu.held import Held, Part, from_words, words
from tinygrad_nv.tile.language.gpu.layout import (
    LANE_BITS,
    NONE,
    Extents,
    Layout,
    absent,
    axes_with_padding,
    extents,
)
from tinygrad_nv.tile.language.gpu.ranks import Ranks
from tinygrad_nv.tile.language.gpu.swaps import FULL, SEGMENT, exchange_parts
from tinygrad_nv.tile.language.ir import Op


class Sorting(Ranks):
    """Sorts and gathers."""

    def do_sort(self, op: Op) -> None:
        axis, down = op.attributes["axis"], op.attributes["descending"]
        layout = self.assignment.layout(op.result)
        held = self.value(op.operands[0], layout)
        each = self._fill_padding(held, axis, down)
        bits = list(extents(held.shape).of_axis(axis))
        for stage in range(1, len(bits) + 1):
            turning = bits[stage] if stage < len(bits) else None
            for bit in reversed(bits[:stage]): each = self._pass(layout, each, bit, turning, down)
        gone = absent(layout, held.shape)
        some = [None if out else one for one, out in zip(each, gone, strict=True)]
        self.put_held(op.result, self.from_singles(held.dtype, held.shape, layout, some))

    def _fill_padding(self, held: Held, axis: int, down: bool) -> Elements:
        """The elements, and beyond the axis what comes last."""
        each = self.singles(held)
        if axis not in axes_with_padding(held.shape) and None not in each: return each
        last = elements.constant(self.kb, neutral("max" if down else "min", held.dtype), held.dtype)
        made: Elements = []
        for register, one in enumerate(each):
            test = self.inside(held.layout, held.shape, register, (axis,))
            if one is None: made.append(last)       # beyond another axis, too
            elif test is None: made.append(one)
            else:
                made.append(elements.apply_row(self.kb, "where",
                                             [Lanes(self.kb, dtypes.bool, [test]), one, last]))
        return made

    def _pass(self, layout: Layout, each: Elements, bit: int, turning: int | None, down: bool) -> Elements:
        """Elements whose indices differ in one bit, in order."""
        made = list(each)
        if bit in layout.registers:
            for low, index in enumerate(layout.indices):
                if index >> bit & 1: continue
                high = layout.numbers[index | 1 << bit]
                turned = self._is_descending(layout, index, turning, down)
                small, large = (self._extreme(fn, each[low], each[high]) for fn in ("min", "max"))
                made[low], made[high] = self._choice(turned, large, small), self._choice(turned, small, large)
            return made
        at = next(at for at, one in layout.thread_bits([bit]) if one == bit)
        for register, other in enumerate(exchange_parts(self, each, at)):
            turned = self._is_descending(layout, layout.indices[register], turning, down)
            upper = self.threads.bit(at)
            larger = upper if turned is False else ~upper if turned is True else upper ^ turned
            if larger.negated: larger = self._plain(larger)
            small, large = (self._extreme(fn, each[register], other) for fn in ("min", "max"))
            made[register] = self._choice(larger, large, small)
        return made

    def _is_descending(self, layout: Layout, index: int, turning: int | None, down: bool) -> Register | bool:
        """Whether elements descend here."""
        if turning is None: return down
        for at, _ in layout.thread_bits([turning]):
            return self._plain(~self.threads.bit(at)) if down else self.threads.bit(at)
        return bool(index >> turning & 1) != down

    def _plain(self, test: Register) -> Register:
        if not test.negated: return test
        made = self.kb.reg("pred")
        self.kb.emit("not.pred", made, ~test)
        return made

    def _extreme(self, fn: str, a: Part, b: Part) -> Lanes:
        assert a is not None
        assert b is not None
        return elements.apply_row(self.kb, fn, [a, b])

    def _choice(self, test: Register | bool, yes: Lanes, no: Lanes) -> Lanes:
        if isinstance(test, bool): return yes if test else no
        return elements.apply_row(self.kb, "where", [Lanes(self.kb, dtypes.bool, [test]), yes, no])

    # **** gathers ****

    def do_gather(self, op: Op) -> None:
        source, index = op.operands
        axis, result = op.attributes["axis"], op.result
        layout, x = self.assignment.layout(result), self.value(source)
        lookup = plan_lookup(x, result.shape, layout, axis)
        if lookup is not None:
            return self.put(result, self._look_up(lookup, x, self.value(index, layout)), layout)
        at, order = self.value(index, layout), _Plain(x.shape, x.dtype)
        gone, strides = absent(layout, result.shape), order.strides
        of = extents(result.shape)
        others = {i: strides[i] for i in range(len(result.shape)) if i != axis}
        with self.arena.scratch(order.nbytes) as start:
            self.arena.writes(start, order.nbytes)
            spill(self, x, order, start)
            self.arena.reads(start, order.nbytes)
            base = address(self, start, self.threads.weigh(layout, result.shape, others))
            found: list[Part] = []
            for register, code in enumerate(layout.indices):
                more = sum(of.coordinate(code, i) * stride for i, stride in others.items())
                found.append(None if gone[register] else self._gather_lane(
                    base, more, at.element(register), strides[axis], x,
                    self.inside(layout, result.shape, register)))
        parts = found if layout.count == 1 else pair_parts(found)
        return self.scopes.put(result, Held(result.dtype, result.shape, layout, parts))

    def _look_up(self, lookup: Lookup, x: Held, index: Held) -> list[Part]:
        """Parts of a gather within a warp."""
        each, found = self.singles(x), list[Part]()
        for registers in lookup.registers:
            if not registers: found.append(None)
            else:
                at = index.element(len(found))
                found.append(self._look_up_one(lookup, each, registers,
                                               at if isinstance(at, Register) else int(at)))
        return found if len(found) == 1 else pair_parts(found)

    def _look_up_one(self, lookup: Lookup, each: Elements, registers: Mapping[int, int],
                     index: Register | int) -> Part:
        """The element of a lane at an index, which is in one of some registers by their places."""
        kb, lane = self.kb, self._lane_of(lookup, index)
        made: Part = None
        for place, register in registers.items():
            if isinstance(index, int) and index & lookup.mask != place: continue
            part = each[register]
            assert part is not None
            if lane is not None:
                word, = words(kb, part, 1)
                there = kb.reg(word.kind)
                kb.emit("shfl.sync.idx.b32", there, word, lane, SEGMENT, FULL)
                part = from_words(kb, part.dtype, [there], 1)
            if made is None: made = part
            else:
                test = Lanes(kb, dtypes.bool, [(index & lookup.mask) == place])
                made = elements.apply_row(kb, "where", [test, part, made])
        return made

    def _lane_of(self, lookup: Lookup, index: Register | int) -> Register | int | None:
        """The lane that has the element at an index; None where that is the own one."""
        if not lookup.lanes: return None
        first = lookup.lanes[0][1]
        if lookup.lanes == [(i, first + i) for i in range(LANE_BITS)]:  # shfl reads five bits
            return index >> first if first else index
        mine = sum(1 << at for at, _ in lookup.lanes)
        made: Register | int = self.kb.special("laneid").to("s32") & SEGMENT - mine
        for at, bit in lookup.lanes: made = made + ((index >> bit & 1) << at)
        return made

    def _gather_lane(self, base: Register, nbytes: int, index: float | Register, stride: int, x: Held,
                  there: Register | None) -> Lanes:
        kb, place = self.kb, base
        if isinstance(index, Register):
            place = kb.reg("u32")
            kb.emit("mad.lo.s32", place, index, stride, base)
        else: nbytes += int(index) * stride
        (made,) = fetch(kb, place, nbytes, x.dtype, 1, there, 0, "shared")
        return made


@dataclass(frozen=True)
class Lookup:
    """A gather within a warp: of each register of the result the registers that may have its element, by what
    `mask` leaves of the index; bits of the lane, and those of the index that they are."""
    registers: Sequence[Mapping[int, int]]
    mask: int
    lanes: Sequence[tuple[int, int]]


def plan_lookup(x: Held, shape: tuple[int, ...], layout: Layout, axis: int) -> Lookup | None:
    """How a tile's elements are gathered within a warp; None where they are not, or by too many shuffles."""
    source, target = extents(x.shape), extents(shape)
    along, own = source.of_axis(axis), target.of_axis(axis)

    def places(of: Extents, bits: Sequence[int], gone: range) -> list[tuple[int, int]]:
        """The axis and the place within it of each bit that is none of the gathered axis."""
        return [(-1, 0) if bit == NONE or bit in gone else next(
            (i, bit - of.first[i]) for i in range(len(of.shape)) if bit in of.of_axis(i)) for bit in bits]
    lanes = [(at, bit - along.start) for at, bit in x.layout.thread_bits(along)]
    if places(source, x.layout.threads, along) != places(target, layout.threads, own) or \
            any(at >= LANE_BITS for at, _ in lanes): return None
    mask = sum(1 << bit - along.start for bit in x.layout.registers if bit in along)
    found: dict[tuple[int, ...], dict[int, int]] = {}
    others = [i for i in range(len(shape)) if i != axis]
    for register in x.inside():
        code = x.layout.indices[register]
        if absent(x.layout, x.shape)[register]: continue
        key = tuple(source.coordinate(code, i) for i in others)
        found.setdefault(key, {})[source.coordinate(code, axis)] = register
    gone = absent(layout, shape)
    registers = [{} if gone[i] else found.get(tuple(target.coordinate(code, i) for i in others), {})
                 for i, code in enumerate(layout.indices)]
    count = sum(map(len, registers))
    return Lookup(registers, mask, lanes) if not lanes or count <= x.layout.count + layout.count else None


class _Plain(SharedOrder):
    """Elements in row-major order without gaps, extents rounded up: an index's place is its product with the
    axis's stride."""

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        super().__init__(shape, dtype, False)
        self.row = 32

    @property
    def strides(self) -> list[int]:
        """Bytes along each axis."""
        return [self.dtype.itemsize << first for first in self.of.first]


