"""Layouts: which thread holds which elements of a tile, in which of its registers.

Protocol: extents are rounded up to powers of two, and elements are numbered in row-major order of the rounded
extents, so that an element's index is a number of so many bits. A `Layout` says of each bit of a register's
number and of each bit of a thread's number (its lane first, then its warp) which bit of the index it is; -1
of a thread's bit: threads that differ in it hold copies. Every bit of an index belongs to one register's or
thread's bit. That is a linear layout (Zhou et al. 2025, "Linear Layouts: Robust Code Generation of Efficient
Tensor Computation Using F2") whose bases are single bits, which covers rows of vectors, accumulators of the
tensor cores, and all that reductions, broadcasts, transposes and reshapes make of them:

    a reduced axis      its bits are taken out; of threads' bits copies remain           `without`
    a transpose         bits change their places in the index                            `move_bits`
    a new axis          the layout of the wider tile, without it, is that of the source

What two extents are rounded to is not part of the tile: `Extents` knows what lies inside.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

LANE_BITS = 5
NONE = -1
NARROW = 16         # columns of float32 that are 64 bytes
SCANNED_BITS = 3    # of an axis of which a thread has as much at least


def bits_of(extent: int) -> int:
    """Bits that count an extent."""
    return max(extent - 1, 0).bit_length()


@dataclass(frozen=True)
class Extents:
    """A tile's shape, and the bits of its axes."""
    shape: tuple[int, ...]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bits of each axis."""
        return tuple(map(bits_of, self.shape))

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The lowest bit of each axis."""
        return tuple(sum(self.widths[axis + 1:]) for axis in range(len(self.shape)))

    @cached_property
    def bits(self) -> int:
        """Bits of an index."""
        return sum(self.widths)

    def of_axis(self, axis: int) -> range:
        """The bits of an axis, the lowest first."""
        return range(self.first[axis], self.first[axis] + self.widths[axis])

    def coordinate(self, index: int, axis: int) -> int:
        """An index's place along an axis."""
        return index >> self.first[axis] & (1 << self.widths[axis]) - 1

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""
        return all(extent == 1 << width for extent, width in zip(self.shape, self.widths, strict=True))

    def inside(self, index: int) -> bool:
        """Whether an index is an element."""
        return all(self.coordinate(index, axis) < extent for axis, extent in enumerate(self.shape))


@lru_cache(4096)
def extents(shape: tuple[int, ...]) -> Extents:
    """The extents of a shape."""
    return Extents(shape)


@dataclass(frozen=True)
class Layout:
    """Bits of the index that registers' bits and threads' bits stand for."""
    registers: tuple[int, ...]
    threads: tuple[int, ...]

    @property
    def count(self) -> int:
        """Registers of a thread."""
        return 1 << len(self.registers)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Indices that each register adds to a thread's index."""
        made = [0]
        for bit in self.registers: made += [index | 1 << bit for index in made]
        return tuple(made)

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """The register of what is added to a thread's index."""
        return {index: number for number, index in enumerate(self.indices)}

    @cached_property
    def copies(self) -> int:
        """The bits of a thread's number that make no difference, as a mask."""
        return sum(1 << i for i, bit in enumerate(self.threads) if bit == NONE)

    def thread_bits(self, bits: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Each thread's bit that is one of some bits of the index, and which of them."""
        for at, bit in enumerate(self.threads):
            if bit != NONE and bit in bits: yield at, bit

    def without(self, bits: Sequence[int]) -> Layout:
        """The layout of a tile that lacks these bits; those above them move down."""
        gone = sorted(bits)

        def lower_bits(bit: int) -> int: return bit - sum(each < bit for each in gone)
        return Layout(tuple(lower_bits(bit) for bit in self.registers if bit not in gone),
                      tuple(NONE if bit in gone or bit == NONE else lower_bits(bit) for bit in self.threads))

    def repeat_along(self, bits: Sequence[int]) -> Layout | None:
        """The layout of a tile with these bits besides, among lanes that hold copies; None where they are too
        few."""
        spare, new = [at for at in range(LANE_BITS) if self.threads[at] == NONE], sorted(bits)
        if len(spare) < len(new): return None

        def raise_bits(bit: int) -> int:
            for each in new: bit += each <= bit
            return bit
        threads = [NONE if bit == NONE else raise_bits(bit) for bit in self.threads]
        for at, bit in zip(spare, new, strict=False): threads[at] = bit
        return Layout(tuple(map(raise_bits, self.registers)), tuple(threads))

    def move_bits(self, to: Mapping[int, int]) -> Layout:
        """The layout with each bit of the index in another place."""
        return Layout(tuple(to[bit] for bit in self.registers),
                      tuple(NONE if bit == NONE else to[bit] for bit in self.threads))

    @property
    def with_pair_axis(self) -> Layout:
        """The layout of a tile with a new last axis of two elements, which are side by side in a thread."""
        return Layout((0, *(bit + 1 for bit in self.registers)),
                      tuple(NONE if bit == NONE else bit + 1 for bit in self.threads))

    def with_run(self, axis: range) -> Layout:
        """The layout with the registers in an order that has elements side by side along an axis first."""
        first: list[int] = []
        for bit in axis:
            if bit not in self.registers: break
            first.append(bit)
        return Layout((*first, *(bit for bit in self.registers if bit not in first)), self.threads)

    def run(self, axis: range) -> int:
        """So many registers side by side hold elements side by side along an axis of these bits."""
        count = 0
        for bit, wanted in zip(self.registers, axis, strict=False):
            if bit != wanted: break
            count += 1
        return 1 << count


def transpose_bits(shape: Sequence[int], permutation: Sequence[int]) -> dict[int, int]:
    """Returns where each bit of a tile's index goes when its axes are permuted."""
    source, target = extents(tuple(shape)), extents(tuple(shape[axis] for axis in permutation))
    made: dict[int, int] = {}
    for to, axis in enumerate(permutation):
        made.update(zip(source.of_axis(axis), target.of_axis(to), strict=True))
    return made


def broadcast_bits(narrow: Sequence[int], wide: Sequence[int]) -> tuple[int, ...]:
    """The bits of a wide tile's index that the tile which it repeats does not have."""
    padded = (1,) * (len(wide) - len(narrow)) + tuple(narrow)
    target = extents(tuple(wide))
    return tuple(bit for axis, (a, b) in enumerate(zip(padded, wide, strict=True)) if a != b
                 for bit in target.of_axis(axis))


def keeps_order(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether elements have the same index in two shapes of as many elements."""
    left, right = [n for n in a if n > 1], [n for n in b if n > 1]
    if left == right: return True
    # below the outermost axis nothing may be rounded
    return extents(tuple(left[1:])).exact and extents(tuple(right[1:])).exact and \
        bits_of(math.prod(left)) == extents(tuple(left)).bits == extents(tuple(right)).bits


# **** which there are ****

def block_layout(shape: Sequence[int], contiguous: int, vector: int, thread_bits: int) -> Layout:
    """Vectors along an axis; lanes along it as far as it reaches, warps along others first."""
    of = extents(tuple(shape))
    along = list(of.of_axis(contiguous))
    others = [bit for axis in reversed(range(len(shape))) if axis != contiguous for bit in of.of_axis(axis)]
    spare = max(of.bits - thread_bits, 0)               # a thread needs no more than its share
    first = min(vector.bit_length() - 1, len(along), spare)
    registers, along = along[:first], along[first:]
    lanes = (along + others)[:LANE_BITS]
    rest_along, rest = [bit for bit in along if bit not in lanes], [bit for bit in others if bit not in lanes]
    warps = (rest + rest_along)[:max(thread_bits - LANE_BITS, 0)]
    threads = lanes + [NONE] * (LANE_BITS - len(lanes)) + warps
    threads += [NONE] * (thread_bits - len(threads))
    return Layout((*registers, *(bit for bit in rest_along + rest if bit not in warps)), tuple(threads))


def columns_layout(shape: Sequence[int], axis: int, thread_bits: int) -> Layout:
    """Elements side by side along an axis in each thread, neighbours along the others in lanes; where threads
    are left, they have parts of the axis, of 2^SCANNED_BITS elements at least."""
    of = extents(tuple(shape))
    along = list(of.of_axis(axis))
    others = [bit for bit in range(of.bits) if bit not in along]
    threads, rest = others[:thread_bits], others[thread_bits:]
    spare = max(min(thread_bits - len(threads), len(along) - SCANNED_BITS), 0)
    own, threads = along[:len(along) - spare], threads + along[len(along) - spare:]
    return Layout((*own, *rest), (*threads, *[NONE] * (thread_bits - len(threads))))


def ranks_layout(shape: Sequence[int], thread_bits: int) -> Layout:
    """Parts of an axis of warps; of each register elements side by side in lanes."""
    every = list(range(extents(tuple(shape)).bits))
    lanes, rest = every[:LANE_BITS], every[LANE_BITS:]
    first = max(len(rest) - (thread_bits - LANE_BITS), 0)
    threads = (*lanes, *[NONE] * (LANE_BITS - len(lanes)), *rest[first:])
    return Layout(tuple(rest[:first]), (*threads, *[NONE] * (thread_bits - len(threads))))


def accumulator(shape: Sequence[int], warps_m: int, warps_n: int, grouped: bool = False) -> Layout:
    """The accumulator of m16n8 products of a tile (m, n), m and n at least 16: warps 16 rows apart, and 16
    columns. With warps along m alone it is that of wgmma, too, and the left operand of 16 bits. `grouped`: of
    wgmma, where warps along n have columns side by side."""
    of = extents(tuple(shape))
    row, column = list(of.of_axis(0)), list(of.of_axis(1))
    m, n = warps_m.bit_length() - 1, warps_n.bit_length() - 1
    lanes = column[1:3] + row[:3]
    across, rest = (column[len(column) - n:], column[4:len(column) - n]) if grouped else \
        (column[4:4 + n], column[4 + n:])
    warps = [bit for some, count in ((row[4:4 + m], m), (across, n))
             for bit in (*some, *[NONE] * (count - len(some)))]
    registers = (column[0], row[3], column[3], *rest, *row[4 + m:])
    return Layout(registers, (*lanes, *warps))


def spread(shape: Sequence[int], thread_bits: int, k_major: bool = False, rows: bool = False) -> Layout:
    """A tile (m, n) of sums of float32 in ordinary arithmetic: lanes and warps over both axes, as square as
    may be, or with `rows` warps over rows first. A thread has four columns side by side; two, as mma has,
    where elements of a column of the right operand lie side by side (`k_major`): the columns of eight lanes
    then lie in different banks, and so do the sums of half a warp where they are stored as the next operand,
    swizzled by every row, or in rows of 64 bytes by every second one (tile/layout.py)."""
    of = extents(tuple(shape))
    row, column = list(of.of_axis(0)), list(of.of_axis(1))
    spare, (own, across) = max(of.bits - thread_bits, 0), (1, 2) if k_major else (2, 3)
    first = min(own, len(column), spare)
    registers, column = column[:first], column[first:]
    threads: list[int] = []
    for _ in range(min(across, len(column))): threads.append(column.pop(0))
    if k_major and len(row) > 2:
        row[:3] = (row[0], row[2], row[1]) if shape[1] <= NARROW else (row[1], row[2], row[0])
    while len(threads) < thread_bits and (row or column):
        lane, left = len(threads) < LANE_BITS, thread_bits - len(threads)
        down = k_major if lane else rows and k_major and len(row) > left
        if not down: down = len(row) >= len(column) + (0 if lane else first)
        threads.append((row if row and (down or not column) else column).pop(0))
    return Layout((*registers, *column, *row), tuple(threads + [NONE] * (thread_bits - len(threads))))


@lru_cache(4096)
def absent(layout: Layout, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether what each register holds is outside, in all threads."""
    of = extents(shape)
    return tuple(not of.inside(index) for index in layout.indices)


@lru_cache(4096)
def axes_with_padding(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes whose extent is no power of two."""
    of = extents(shape)
    return tuple(axis for axis, extent in enumerate(shape) if extent != 1 << of.widths[axis])
