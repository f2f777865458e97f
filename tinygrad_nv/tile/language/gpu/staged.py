"""Operands of dots in shared memory.

Protocol: a tile (rows, columns) as it is held lies in rows of its columns, a `SharedTile` (tile/layout.py)
that ldmatrix, wgmma and TMA read alike. It has the rows and columns that the dots' instructions read; what of
them is beyond the tile or outside of the tensor is 0. From memory they come by cp.async where a copy has 4
bytes or more, else element by element; from registers in vectors.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import DType

from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import Number
from tinygrad_nv.tile.language.gpu.access import fetch, store
from tinygrad_nv.tile.language.gpu.convert import Writer, convert_layout, inside, pair_parts
from tinygrad_nv.tile.language.gpu.held import Held, Part
from tinygrad_nv.tile.language.gpu.layout import Layout, absent, extents
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.ranges import Known
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import CHUNK, Places, join_elements, swizzle_offset, swizzle_plain

ALIGN = 1024
MOST_OFFSET = (1 << 31) - 1


@dataclass(frozen=True)
class SharedOperand:
    """A tile `start` bytes after the arena's beginning, or after a stage's."""
    start: int
    tile: SharedTile
    dtype: DType
    base: Register | None = None

    def at(self, base: Register) -> SharedOperand:
        """The same `start` bytes after a shared address (u32), in a ring that has its own barriers."""
        return replace(self, base=base)

    def address(self, writer: Writer) -> Register:
        """Its shared address: u32."""
        return (writer.arena.address if self.base is None else self.base) + self.start


def tile_in_smem(rows: int, columns: int, dtype: DType) -> SharedTile:
    """The tile of so many rows and columns; rows have whole chunks of 16 bytes."""
    nbytes = -(-columns * dtype.itemsize // CHUNK) * CHUNK
    return SharedTile(rows, nbytes)


# **** from registers ****

def from_registers(writer: Writer, held: Held, to: SharedOperand) -> None:
    """Writes a tile from registers."""
    kb, arena, layout, tile, size = writer.kb, writer.arena, held.layout, to.tile, held.dtype.itemsize
    of = extents(held.shape)
    arena.writes(to.start, tile.nbytes)
    if held.shape != (tile.rows, tile.row_bytes // size):
        clear(writer, to)
        arena.sync()
        arena.writes(to.start, tile.nbytes)
    row, column = (_as_u32(writer, writer.threads.coordinate(layout, held.shape, axis))
                   for axis in range(2))
    places = Places(kb, tile, swizzle_offset(tile, row, column * size))
    places.at_stage(writer.arena.address)
    count = min(layout.run(of.of_axis(1)), CHUNK // size, layout.count)
    while held.shape[1] % count: count //= 2
    gone, mine = absent(layout, held.shape), writer.threads.first(layout.copies)
    for register in range(0, layout.count, count):
        if gone[register]: continue
        guard, there = mine, inside(writer, layout, held.shape, register)
        if there is not None: guard = there if guard is None else guard & there
        index = layout.indices[register]
        at = places(tile.plain(of.coordinate(index, 0), of.coordinate(index, 1) * size), to.start)
        first = register // held.width
        parts = [part for part in held.parts[first:first + max(count // held.width, 1)] if part is not None]
        assert isinstance(at.base, Register)
        store(kb, at.base, at.offset, parts, count, guard, "shared",
               register % held.width if count == 1 else 0)
    arena.unfenced = True


def to_registers(writer: Writer, found: SharedOperand, wanted: Layout, shape: tuple[int, ...]) -> list[Part]:
    """Reads a tile that fills its rows and columns."""
    kb, tile, size = writer.kb, found.tile, found.dtype.itemsize
    of, last = extents(shape), len(shape) - 1
    layout = wanted.with_run(of.of_axis(last))
    row = writer.threads.coordinate(layout, shape, 0) if last else 0
    places = Places(kb, tile, swizzle_offset(tile, _as_u32(writer, row), _as_u32(
        writer, writer.threads.coordinate(layout, shape, last)) * size))
    places.at_stage(writer.arena.address if found.base is None else found.base)
    count = min(layout.run(of.of_axis(last)), CHUNK // size, layout.count)
    parts: list[Part] = []
    for register in range(0, layout.count, count):
        index = layout.indices[register]
        first = of.coordinate(index, 0) if last else 0
        at = places(tile.plain(first, of.coordinate(index, last) * size), found.start)
        assert isinstance(at.base, Register)
        parts += fetch(kb, at.base, at.offset, found.dtype, count, space="shared")
    if count == 1 < layout.count: parts = pair_parts(parts)
    return convert_layout(writer, Held(found.dtype, shape, layout, parts), wanted).parts


def _as_u32(writer: Writer, value: Register | int) -> Register:
    made = writer.kb.reg("u32")
    with writer.threads.prelude(): writer.kb.emit("mov.b32", made, value)
    return made


def clear(writer: Writer, to: SharedOperand) -> None:
    """Zeros throughout."""
    kb, threads = writer.kb, 1 << writer.threads.bits
    own = writer.arena.address + kb.tid.x * CHUNK
    for first in range(0, to.tile.nbytes, threads * CHUNK):
        left = (to.tile.nbytes - first) // CHUNK
        guard = kb.tid.x < left if left < threads else None
        kb.emit("st.shared.v4.b32", own.at(to.start + first), [0, 0, 0, 0], guard=guard)


# **** from memory ****

class BlockCopy:
    """Copies blocks of a tensor, (rows, columns) of its two axes with a size, to a tile."""

    def __init__(self, writer: Writer, tensor: TensorParameter, pointer: Register, sizes: Sequence[int],
                 known: Sequence[Known], tile: SharedTile) -> None:
        self.writer, self.kb, self.tensor, self.pointer, self.tile = writer, writer.kb, tensor, pointer, tile
        self.sizes, self.known, self.size = sizes, known, tensor.dtype.itemsize
        self.axes = [axis for axis, size in enumerate(sizes) if size]
        self.width = self._width()
        kb, threads = self.kb, 1 << writer.threads.bits
        across = tile.span // CHUNK
        self.rows_at_once = max(threads // across, 1)
        with writer.threads.prelude():
            self.places = Places(kb, tile, swizzle_plain(kb.tid.x * CHUNK, tile))
            self.row, self.byte = self._as_s32(kb.tid.x // across), self._as_s32(kb.tid.x % across * CHUNK)

    def _as_s32(self, value: Register) -> Register:
        made = self.kb.reg("s32")
        self.kb.emit("mov.b32", made, value)
        return made

    def _width(self) -> int:
        """Bytes of a copy."""
        last, width = len(self.sizes) - 1, CHUNK
        strides = self.tensor.strides
        lengths = [self.known[last].multiple, self.sizes[last], self.tensor.offset]
        if self.needs_bounds(last): lengths.append(self.tensor.shape[last])
        lengths += [stride for axis, stride in enumerate(strides) if axis != last and self._varies(axis)]
        while width > self.size and any(length * self.size % width for length in lengths): width //= 2
        return width

    def _varies(self, axis: int) -> bool:
        return bool(self.sizes[axis] > 1 or self.known[axis].high != 0 or self.known[axis].low != 0)

    def needs_bounds(self, axis: int) -> bool:
        """Whether indices of an axis may lie outside of the tensor."""
        known = self.known[axis]
        return known.low < 0 or known.high + max(self.sizes[axis], 1) > self.tensor.shape[axis]

    def issue(self, starts: Sequence[Number], start: Register, when: Register | None = None) -> None:
        """Copies the block at `starts` to the tile at a shared address (u32), where a predicate holds."""
        tile = self.tile
        rows, columns = self.axes
        base = self._base(starts)
        indexed = self._check_indexed_axes(starts)
        self.places.at_stage(start)
        across = tile.span // CHUNK
        narrow = (1 << self.writer.threads.bits) > across * tile.rows
        for column in range(0, tile.row_bytes, tile.span):
            for row in range(0, tile.rows, self.rows_at_once):
                guard = when
                if narrow or row + self.rows_at_once > tile.rows:
                    mine = self.row < tile.rows - row
                    guard = mine if guard is None else guard & mine
                outside = self._outside(rows, self.row, row, starts[rows], indexed)
                nbytes = row * self.tensor.strides[rows] * self.size + column
                plain = tile.plain(row, column)
                if self.width < 4:
                    self._elements(base, nbytes, plain, guard, outside, columns, column, starts[columns])
                else:
                    self._asynchronous(base, nbytes, plain, guard, outside, columns, column, starts[columns])

    def _base(self, starts: Sequence[Number]) -> Register:
        """The address of the thread's first bytes."""
        kb, size, pointer = self.kb, self.size, self.pointer
        rows = self.axes[0]
        small = self._small
        for number, stride in zip(starts, self.tensor.strides, strict=True):
            made = kb.reg("u64")
            if not isinstance(number, Register):
                if not number: continue
                kb.emit("add.s64", made, pointer, int(number) * stride * size)
            elif small: kb.emit("mad.wide.s32", made, number, stride * size, pointer)
            else:
                wide = kb.reg("s64")
                kb.emit("cvt.s64.s32", wide, number)
                kb.emit("mad.lo.s64", made, wide, stride * size, pointer)
            pointer = made
        made, total = kb.reg("u64"), kb.reg("u64")
        kb.emit("mad.wide.s32", made, self.row, self.tensor.strides[rows] * size, pointer)
        kb.emit("mad.wide.s32", total, self.byte, 1, made)
        return total

    @property
    def _small(self) -> bool:
        return all(stride * self.size <= MOST_OFFSET for stride in self.tensor.strides)

    def _check_indexed_axes(self, starts: Sequence[Number]) -> Register | None:
        """Whether an axis that a start alone indexes is outside."""
        made: Register | None = None
        for axis, size in enumerate(self.sizes):
            number = starts[axis]
            if size or not self.needs_bounds(axis): continue
            outside = self.kb.reg("pred")
            if isinstance(number, Register):
                self.kb.emit("setp.ge.u32", outside, number, self.tensor.shape[axis])
            else: outside.set(int(not 0 <= number < self.tensor.shape[axis]))
            made = outside if made is None else made | outside
        return made

    def _outside(self, axis: int, own: Register, more: int, start: Number, also: Register | None,
                 elements: int = 1) -> Register | None:
        """Whether place `more` after the thread's own of an axis is outside, in units of 1 / `elements`."""
        made, size = also, self.sizes[axis]
        limit = self.tile.rows if axis == self.axes[0] else self.tile.row_bytes // self.size
        if size < limit:
            beyond = own >= size * elements - more
            made = beyond if made is None else made | beyond
        if self.needs_bounds(axis):
            end = self.tensor.shape[axis] * elements - more
            if isinstance(start, Register):
                at = own + (start * elements if elements > 1 else start)
                beyond = at >= end
            else: beyond = own >= end - int(start) * elements
            made = beyond if made is None else made | beyond
            if self.known[axis].low < 0:
                if isinstance(start, Register):
                    made = made | (own + (start * elements if elements > 1 else start) < -more)
                elif (first := -start * elements - more) > 0: made = made | (own < first)
        return made

    def _asynchronous(self, base: Register, nbytes: int, plain: int, guard: Register | None,
                      outside: Register | None,
                      axis: int, column: int, start: Number) -> None:
        kb, cache = self.kb, "cg" if self.width == CHUNK else "ca"
        for at in range(0, CHUNK, self.width):
            beyond = self._outside(axis, self.byte, column + at, start, outside, self.size)
            source = base.at(nbytes + at) if nbytes + at <= MOST_OFFSET else (base + (nbytes + at)).at()
            kb.emit(f"cp.async.{cache}.shared.global", self.places(plain, at), source, self.width,
                    *([] if beyond is None else [beyond]), guard=guard)
        self.writer.arena.copying = True

    def _elements(self, base: Register, nbytes: int, plain: int, guard: Register | None,
                  outside: Register | None,
                  axis: int, column: int, start: Number) -> None:
        """16 bytes, each element alone."""
        kb, words = self.kb, []
        for word in range(0, CHUNK, 4):
            parts = []
            for at in range(word, word + 4, self.size):
                beyond = self._outside(axis, self.byte, column + at, start, outside, self.size)
                there = self._plain(beyond)
                if guard is not None: there = guard if there is None else guard & there
                made = kb.reg("b16" if self.size == 2 else "b32", 0)
                kb.emit(f"ld.global.{'u8' if self.size == 1 else f'b{8 * self.size}'}", made,
                        base.at(nbytes + at),
                        guard=there)
                parts.append(made)
            words.append(join_elements(kb, parts))
        kb.emit("st.shared.v4.b32", self.places(plain), words, guard=guard)

    def _plain(self, beyond: Register | None) -> Register | None:
        if beyond is None: return None
        made = self.kb.reg("pred")
        self.kb.emit("not.pred", made, beyond)
        return made
