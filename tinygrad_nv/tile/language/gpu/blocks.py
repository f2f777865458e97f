"""Blocks of tensors: where their elements lie, and which of them are inside.

Protocol: a `BlockPlace` is made for each access to a block. A thread's first element has an address; those of
other registers are constants away. A register's vector has a guard where it may lie outside: of the tensor,
which `ranges` tell, or of a tile whose extents are no powers of two: of a store, or of few elements.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.language.gpu.layout import Layout, extents
from tinygrad_nv.tile.language.ir import TensorParameter, Value

if TYPE_CHECKING:
    from tinygrad_nv.tile.language.gpu.values import Values

SMALL = 1 << 31     # elements that 32 bits count
MOST = 16           # elements of a vector at most
FEW = 16            # elements of a thread, whose padding is not loaded
NEAR = 1 << 20      # bytes that an access adds to its address: SASS has 24 bits


class BlockPlace:
    """A block of `sizes` at `starts` of a tensor, as a tile in a layout."""

    def __init__(self, writer: Values, tensor: TensorParameter, sizes: Sequence[int], starts: Sequence[Value],
                 layout: Layout, whole: bool) -> None:
        """`whole`: only the tile is touched; else what is beside it may be, inside of the tensor: of a thread
        that has few elements only what its vectors have. Guards of many would take more time than reading."""
        self.writer, self.kb, self.tensor, self.layout = writer, writer.kb, tensor, layout
        self.starts, self.sizes = starts, sizes
        self.axes = [axis for axis, size in enumerate(sizes) if size]
        self.shape = tuple(sizes[axis] for axis in self.axes)
        self.of = extents(self.shape)
        self.known = [writer.ranges.of(each) for each in starts]
        self.whole, self.trims = whole, whole or layout.count <= FEW
        self.bounded = [self._reaches(axis) for axis in range(len(self.known))]
        self._compared: dict[tuple[int, int, int], Register | None] = {}
        self._guards: dict[tuple[int, ...], Register | None] = {}
        self._uniform = self._check_indexed_axes()
        self._base: Register | None = None

    def _reaches(self, axis: int) -> bool:
        """Whether indices of an axis may lie outside of the tensor."""
        size = self.sizes[axis]
        if size and not self.trims: size = 1 << self.of.widths[self.axes.index(axis)]
        elif size and not self.whole and axis == len(self.sizes) - 1: size += -size % MOST
        return not self.writer.ranges.inside(self.tensor, axis, self.starts, max(size, 1))

    # **** addresses ****

    @property
    def base(self) -> Register:
        """The address of the thread's first element."""
        if self._base is None: self._base = self._address()
        return self._base

    def _address(self) -> Register:
        strides, size = self.tensor.strides, self.tensor.dtype.itemsize
        pointer = self.writer.pointers[self.tensor.name]
        own = self.writer.threads.weigh(self.layout, self.shape,
                                           {i: strides[axis] for i, axis in enumerate(self.axes)})
        if not self._small:
            for start, stride in zip(self.starts, strides, strict=True):
                pointer = self._advance(pointer, start, stride * size)
            return self._add_offset(pointer, own, size)
        offset: Register | int = own
        for start, stride in zip(self.starts, strides, strict=True):
            number = self.writer.number(start)
            if isinstance(number, Register): offset = (number * stride if stride != 1 else number) + offset
        rest = self._constant_offset - self._near
        if rest: offset = offset + rest
        return pointer if isinstance(offset, int) and not offset else self._add_offset(pointer, offset, size)

    @property
    def _small(self) -> bool:
        return self.tensor.span * 2 < SMALL     # starts may be beyond by a block

    def _add_offset(self, pointer: Register, offset: Register | int, size: int) -> Register:
        made = self.kb.reg("u64")
        if isinstance(offset, Register): self.kb.emit("mad.wide.s32", made, offset, size, pointer)
        else: self.kb.emit("add.s64", made, pointer, offset * size)
        return made

    def _advance(self, pointer: Register, start: Value, nbytes: int) -> Register:
        kb, number = self.kb, self.writer.number(start)
        made = kb.reg("u64")
        if not isinstance(number, Register): kb.emit("add.s64", made, pointer, int(number) * nbytes)
        else:
            wide = kb.reg("s64")
            kb.emit("cvt.s64.s32", wide, number)
            kb.emit("mad.lo.s64", made, wide, nbytes, pointer)
        return made

    @property
    def _constant_offset(self) -> int:
        """Elements from a tensor's first to that of the starts that are known, others being 0."""
        numbers = map(self.writer.number, self.starts)
        return sum(int(number) * stride for number, stride in zip(numbers, self.tensor.strides, strict=True)
                   if not isinstance(number, Register))

    @cached_property
    def _near(self) -> int:
        """The same where it is few, which accesses add: blocks that differ in these starts alone share an
        address."""
        known = self._constant_offset
        return known if self._small and abs(known) * self.tensor.dtype.itemsize < NEAR else 0

    def offset(self, register: int) -> int:
        """Bytes from the thread's first element to that of a register."""
        index = self.layout.indices[register]
        return self.tensor.dtype.itemsize * (self._near + sum(
            self.of.coordinate(index, i) * self.tensor.strides[axis] for i, axis in enumerate(self.axes)))

    # **** vectors ****

    def vector(self) -> int:
        """Elements side by side that a thread can access at once."""
        strides, size = self.tensor.strides, self.tensor.dtype.itemsize
        if not self.axes or self.axes[-1] != len(self.sizes) - 1: return 1
        last = len(self.sizes) - 1
        made = min(self.layout.run(self.of.of_axis(len(self.axes) - 1)), max(16 // size, 1),
                   self.layout.count)
        while made > 1 and not self._is_aligned(made, strides, last): made //= 2
        return made

    def _is_aligned(self, count: int, strides: Sequence[int], last: int) -> bool:
        if self.known[last].multiple % count or self.tensor.offset % count: return False
        if self.bounded[last] and self._extent_multiple(last) % count: return False
        if self.whole and self.sizes[last] % count: return False
        return all(stride % count == 0 for axis, stride in enumerate(strides)
                   if axis != last and self._varies(axis))

    def _extent_multiple(self, axis: int) -> int:
        if not self.tensor.among: return self.tensor.shape[axis]
        return self.writer.ranges.of(self.writer.ranges.length(self.starts)).multiple

    def _varies(self, axis: int) -> bool:
        return bool(self.sizes[axis] > 1 or self.known[axis].high != 0 or self.known[axis].low != 0)

    # **** guards ****

    def guard(self, register: int, also: Register | None = None) -> Register | None:
        """Whether what a register holds, the first of a vector, is there; None where it always is."""
        index = self.layout.indices[register]
        key = tuple(self.of.coordinate(index, i) for i in range(len(self.axes)))
        if key not in self._guards:
            made = self._uniform if also is None else self._and(self._uniform, also)
            for i, axis in enumerate(self.axes):
                for one in self._conditions(i, axis, key[i]): made = self._and(made, one)
            self._guards[key] = made
        return self._guards[key]

    def _conditions(self, i: int, axis: int, place: int) -> list[Register]:
        """Returns the conditions that element `place`, after the thread's own, of an axis is inside."""
        made = []
        own = self.writer.threads.coordinate(self.layout, self.shape, i)
        if self.trims and self.sizes[axis] < 1 << self.of.widths[i]:
            made.append(self._below(own, i, self.sizes[axis] - place, -1))
        if self.bounded[axis]:
            index = self._index(i, axis, own)
            if (extent := self._dynamic_extent(axis)) is not None:
                made.append(self._below_extent(index, i, place, extent))
            else: made.append(self._below(index, i, self.tensor.shape[axis] - place, 0))
            if self.known[axis].low < 0: made.append(self._not_below(index, i, -place))
        return [each for each in made if each is not None]

    def _index(self, i: int, axis: int, own: Register | int) -> Register | int:
        key = (i, axis, -2)
        if key not in self._compared:
            start = self.writer.number(self.starts[axis])
            if isinstance(start, Register):
                self._compared[key] = start + own if not isinstance(own, int) or own else start
            elif isinstance(own, Register): self._compared[key] = own + int(start) if start else own
            else: return own + int(start)
        found = self._compared[key]
        assert found is not None
        return found

    def _below(self, value: Register | int, i: int, bound: int, which: int) -> Register | None:
        key = (i, bound, which)
        if key not in self._compared:
            if isinstance(value, int):
                self._compared[key] = None if value < bound else self.kb.reg("pred", 0)
            else: self._compared[key] = value < bound
        return self._compared[key]

    def _dynamic_extent(self, axis: int) -> Register | None:
        """The extent of an axis that only the running kernel knows."""
        if axis == self.tensor.symbolic: return self.writer.row_count
        return self.writer.extents[self.tensor.name] if self.tensor.among and axis else None

    def _below_extent(self, value: Register | int, i: int, place: int, extent: Register) -> Register:
        """Whether an element of such an axis is one."""
        key = (i, place, 2)
        if key not in self._compared: self._compared[key] = extent > value + place
        found = self._compared[key]
        assert found is not None
        return found

    def _not_below(self, value: Register | int, i: int, bound: int) -> Register | None:
        key = (i, bound, 1)
        if key not in self._compared:
            if isinstance(value, int):
                self._compared[key] = None if value >= bound else self.kb.reg("pred", 0)
            else: self._compared[key] = value >= bound
        return self._compared[key]

    def _check_indexed_axes(self) -> Register | None:
        """Whether the axes that a start alone indexes are inside."""
        made: Register | None = None
        for axis, size in enumerate(self.sizes):
            if size or not self.bounded[axis]: continue
            number = self.writer.number(self.starts[axis])
            late = self._dynamic_extent(axis)
            extent = self.tensor.shape[axis] if late is None else late
            if isinstance(extent, int) and not isinstance(number, Register):
                if not 0 <= number < extent: return self.kb.reg("pred", 0)
                continue
            inside = self.kb.reg("pred")    # as unsigned: negative ones are large
            if isinstance(number, Register): self.kb.emit("setp.lt.u32", inside, number, extent)
            else: self.kb.emit("setp.gt.u32", inside, extent, int(number))
            made = self._and(made, inside)
        return made

    def _and(self, a: Register | None, b: Register | None) -> Register | None:
        if a is None or b is None: return b if a is None else a
        return a & b
