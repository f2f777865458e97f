"""A tile in another layout: by another order of registers where each thread has what it needs, else by way of
shared memory.

Protocol: in shared memory elements lie in the order of their indices, with 16 bytes after each row (at least
128 bytes), so that the lanes of a warp, which stand along both axes, meet different banks. An element's place
is the sum of the places of the bits of its index: a thread's part is made once, registers are constants away.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad.dtype import DType

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.language.gpu.access import fetch, store
from tinygrad_nv.tile.language.gpu.arena import Arena
from tinygrad_nv.tile.language.gpu.held import Held, Part, gather_parts
from tinygrad_nv.tile.language.gpu.layout import Layout, absent, axes_with_padding, extents
from tinygrad_nv.tile.language.gpu.threads import Threads

ROW_BYTES = 128
GAP_BYTES = 16


class Writer(Protocol):
    """Operations that a conversion needs of the kernel."""

    @property
    def kb(self) -> Kernel: ...
    @property
    def threads(self) -> Threads: ...
    @property
    def arena(self) -> Arena: ...


def inside(writer: Writer, layout: Layout, shape: tuple[int, ...], register: int,
           axes: Sequence[int] = ()) -> Value | None:
    """Whether what a register holds is an element, along some axes or all; None where it always is."""
    made: Value | None = None
    of = extents(shape)
    for axis in axes_with_padding(shape):
        if axes and axis not in axes: continue
        bound = shape[axis] - of.coordinate(layout.indices[register], axis)
        own = writer.threads.coordinate(layout, shape, axis)
        if isinstance(own, int):
            if own >= bound: return writer.kb.reg("pred", 0)
            continue
        most = sum(1 << bit - of.first[axis] for _, bit in layout.thread_bits(of.of_axis(axis)))
        if most < bound: continue
        test = own < bound
        made = test if made is None else made & test
    return made


def convert_layout(writer: Writer, held: Held, layout: Layout) -> Held:
    """The same tile in another layout."""
    if held.layout == layout: return held
    if held.layout.threads == layout.threads:
        gone = absent(layout, held.shape)
        registers = [None if out else held.layout.numbers[index]
                     for index, out in zip(layout.indices, gone, strict=True)]
        return Held(held.dtype, held.shape, layout, gather_parts(writer.kb, held, registers, held.dtype))
    return by_shared(writer, held, layout, held.shape)


# **** by way of shared memory ****

class SharedOrder:
    """Order of a shape's elements in shared memory: row-major; `dense` without gaps, to be read under another
    shape."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, dense: bool) -> None:
        self.shape, self.dtype, self.dense = shape, dtype, dense
        self.of = extents(shape)
        last = self.of.widths[-1] if shape else 0
        self.row = max(last, (ROW_BYTES // dtype.itemsize).bit_length() - 1)

    def weight(self, bit: int) -> int:
        """Bytes of a bit of an index."""
        size = self.dtype.itemsize
        if not self.dense: return (1 << bit) * size + ((1 << bit) >> self.row) * GAP_BYTES
        axis = next(i for i in range(len(self.shape)) if bit in self.of.of_axis(i))
        stride = 1
        for extent in self.shape[axis + 1:]: stride *= extent
        return (1 << bit - self.of.first[axis]) * stride * size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(self.weight(bit) for bit in range(self.of.bits)) + self.dtype.itemsize

    def offset(self, index: int) -> int:
        """The place of an index."""
        return sum(self.weight(bit) for bit in range(self.of.bits) if index >> bit & 1)

    def own(self, writer: Writer, layout: Layout, gone: Sequence[int] = ()) -> Value | int:
        """A thread's part of a place, without some bits: s32."""
        bits = [bit for bit in range(self.of.bits) if bit not in gone]
        return writer.threads.sum([(at, self.weight(bit)) for at, bit in layout.thread_bits(bits)])

    def vector(self, layout: Layout) -> int:
        """Elements of an access."""
        if self.dense: return 1
        return min(layout.run(range(self.row)), max(16 // self.dtype.itemsize, 1), layout.count)


def address(writer: Writer, start: int, own: Value | int) -> Value:
    """The shared address `start` bytes in the arena plus a thread's part: u32."""
    kb, made = writer.kb, writer.arena.address
    if isinstance(own, int): return made + (start + own) if start + own else made
    place = kb.reg("u32")
    kb.emit("add.u32", place, made, start)
    total = kb.reg("u32")
    kb.emit("add.s32", total, place, own)
    return total


def spill(writer: Writer, held: Held, order: SharedOrder, start: int) -> None:
    """Writes a tile to shared memory; of copies the first thread's."""
    layout, kb = held.layout, writer.kb
    gone, count = absent(layout, held.shape), order.vector(layout)
    mine = writer.threads.first(layout.copies)
    base = address(writer, start, order.own(writer, layout))
    for register in range(0, layout.count, count):
        if gone[register]: continue
        guard = mine
        if order.dense and (there := inside(writer, layout, held.shape, register)) is not None:
            guard = there if guard is None else guard & there
        first = register // held.width
        parts = [part or held.parts[first] for part in held.parts[first:first + max(count // held.width, 1)]]
        store(kb, base, order.offset(layout.indices[register]), [each for each in parts if each], count,
               guard, "shared", register % held.width if count == 1 else 0)


def fill_from_shared(writer: Writer, order: SharedOrder, layout: Layout, start: int) -> list[Part]:
    """Parts of a tile in a layout, from shared memory."""
    gone, count = absent(layout, order.shape), order.vector(layout)
    base = address(writer, start, order.own(writer, layout))
    found: list[Part] = []
    for register in range(0, layout.count, count):
        if all(gone[register:register + count]): found += [None] * max(count // 2, 1)
        else: found += fetch(writer.kb, base, order.offset(layout.indices[register]), order.dtype, count,
                               inside(writer, layout, order.shape, register), 0, "shared")
    return found if count > 1 or layout.count == 1 else pair_parts(found)


def pair_parts(singles: Sequence[Part]) -> list[Part]:
    """Parts of single elements, two by two."""
    made: list[Part] = []
    for a, b in zip(singles[::2], singles[1::2], strict=True):
        one = a or b
        if one is None: made.append(None)
        elif one.halves:
            made.append(Lanes(one.kb, one.dtype, halves=[(a or one).half(0), (b or one).half(0)]))
        else: made.append(Lanes(one.kb, one.dtype, [(a or one).at(0), (b or one).at(0)]))
    return made


def by_shared(writer: Writer, held: Held, layout: Layout, shape: tuple[int, ...]) -> Held:
    """A tile in another layout, and under another shape, by way of shared memory."""
    dense = shape != held.shape
    source, target = (SharedOrder(each, held.dtype, dense) for each in (held.shape, shape))
    with writer.arena.scratch(max(source.nbytes, target.nbytes)) as start:
        writer.arena.writes(start, source.nbytes)
        spill(writer, held, source, start)
        writer.arena.reads(start, source.nbytes)
        parts = fill_from_shared(writer, target, layout, start)
    return Held(held.dtype, shape, layout, parts)
