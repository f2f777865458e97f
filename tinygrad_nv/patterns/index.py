"""Index space: where an element of a tensor lies in the memory it is a view of.

Protocol. A `Space` counts ranges, each from 0 below its extent. An `Affine` is `offset + Σ stride · range`.
`through` takes the indices of a movement op's result to those of its source, `over` takes those of an
elementwise result to those of an argument, and `lies` takes the indices of a dense tensor to its elements.
What has no such form raises `NotAffine` with the reason.

A reshape divides indices. Where the quotient has no form over the ranges there are, a range is divided in two
(r = r₁ · inner + r₀), for everything in the space: that changes the order in which elements are visited, and
none of them. Indices made before refer to the parts then; `resolve` puts these in.

An extent may be a UOp, of a symbolic tensor: such a range is never divided, and its storage has the largest
extent. Everything else is Python integers, since graphs have thousands of movement ops.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tinygrad.uop.ops import Ops, UOp, sint


class NotAffine(Exception):
    """There is no `Affine` for an index; the text says what is in the way."""


class Affine:
    """`offset + Σ stride · range`, of ranges known by number. Never changed once made."""
    __slots__ = ("offset", "strides")

    def __init__(self, offset: int, strides: dict[int, int]) -> None:
        self.offset, self.strides = offset, strides

    def key(self) -> tuple[int, ...]:
        """Equal for equal indices."""
        return (self.offset, *(x for pair in sorted(self.strides.items()) for x in pair))

    def __repr__(self) -> str:
        return " + ".join([str(self.offset), *(f"{s}·r{r}" for r, s in self.strides.items())])


ZERO = Affine(0, {})
Indices = tuple[Affine, ...]


def largest(extent: sint) -> int:
    """An extent, or the most that a symbolic one can be."""
    return int(extent.vmax) if isinstance(extent, UOp) else extent


def same(a: sint, b: sint) -> bool:
    """Whether two extents are known to be equal."""
    return a is b if isinstance(a, UOp) or isinstance(b, UOp) else a == b


class Space:
    """The ranges that indices are made of."""

    def __init__(self) -> None:
        self.extents: list[sint] = []
        self.divided: dict[int, tuple[int, int, int]] = {}  # range: (r₁, inner, r₀)

    def range(self, extent: sint) -> Affine:
        """A new range; of extent 1 there is none to count."""
        if not isinstance(extent, UOp) and extent == 1: return ZERO
        self.extents.append(extent)
        return Affine(0, {len(self.extents) - 1: 1})

    def ranges(self, shape: Sequence[sint]) -> Indices: return tuple(map(self.range, shape))

    def leaves(self, number: int) -> list[int]:
        """The parts that a range has been divided into, outermost first."""
        if number not in self.divided: return [number]
        outer, _, inner = self.divided[number]
        return self.leaves(outer) + self.leaves(inner)

    def resolve(self, index: Affine) -> Affine:
        """The same index over ranges that are not divided."""
        while not self.divided.keys().isdisjoint(index.strides):
            strides: dict[int, int] = {}
            for number, stride in index.strides.items():
                if number not in self.divided: strides[number] = strides.get(number, 0) + stride
                else:
                    outer, factor, inner = self.divided[number]
                    for part, more in ((outer, stride * factor), (inner, stride)):
                        strides[part] = strides.get(part, 0) + more
            index = Affine(index.offset, strides)
        return index

    def divide(self, number: int, inner: int) -> None:
        """Divides a range by `inner`, a divisor of its extent."""
        extent = self.extents[number]
        assert isinstance(extent, int)
        self.divided[number] = (len(self.extents), inner, len(self.extents) + 1)
        self.extents += [extent // inner, inner]

    def bounds(self, index: Affine) -> tuple[int, int]:
        """The least and the most that an index can be."""
        least = most = index.offset
        for number, stride in index.strides.items():
            reach = stride * (largest(self.extents[number]) - 1)
            if reach < 0: least += reach
            else: most += reach
        return least, most

    # **** movement ops ****

    def through(self, node: UOp, indices: Indices) -> Indices:
        """The indices of a movement op's source, from those of its result."""
        op, source = node.op, node.src[0]
        if op is Ops.PERMUTE:
            made = [ZERO] * len(indices)
            for index, axis in zip(indices, node.marg, strict=True): made[axis] = index
            return tuple(made)
        if op is Ops.RESHAPE: return self._reshape(source.shape, node.marg, indices)
        if op is Ops.EXPAND: return indices[len(node.marg):]
        if op is Ops.SHRINK: return tuple(_add_offset(index, offset) for index, (offset, _) in
                                          zip(indices, node.marg, strict=True))
        if op is Ops.PAD:
            return tuple(self._inside(index, extent, *arg) for index, extent, arg in
                         zip(indices, source.shape, node.marg, strict=True))
        assert op is Ops.FLIP
        return tuple(_flip(index, extent) if flip else index for index, extent, flip in
                     zip(indices, source.shape, node.marg, strict=True))

    def _inside(self, index: Affine, extent: sint, offset: sint, size: sint) -> Affine:
        """An index before padding, if what is read never is padding."""
        if not isinstance(offset, UOp) and offset == 0 and same(extent, size): return index
        if isinstance(offset, UOp) or isinstance(extent, UOp): raise NotAffine("padding of symbolic extent")
        least, most = self.bounds(index := self.resolve(index))
        if least < offset or most >= offset + extent: raise NotAffine("padding")
        return _add_offset(index, -offset)

    def _reshape(self, source: Sequence[sint], result: Sequence[sint], indices: Indices) -> Indices:
        """Returns indices through a reshape: both shapes fall into groups of dimensions of equal products,
        each a reshape of its own."""
        made = [ZERO] * len(source)
        i, j = len(source), len(result)
        while True:
            while i and same(source[i - 1], 1): i -= 1
            while j and same(result[j - 1], 1): j -= 1
            if not i or not j: return tuple(made)
            i, j = i - 1, j - 1
            if same(source[i], result[j]):
                made[i] = indices[j]
                continue
            first, last = i, j
            inner, outer = source[i], result[j]
            while not same(inner, outer):
                if isinstance(inner, UOp) or isinstance(outer, UOp):
                    raise NotAffine("a reshape of symbolic extents")
                if not inner or not outer: raise NotAffine("a reshape without elements")
                if inner < outer: inner *= source[i := i - 1]
                else: outer *= result[j := j - 1]
            whole = _combine(result[j:last + 1], indices[j:last + 1])
            made[i:first + 1] = self.digits(whole, source[i:first + 1])

    def digits(self, whole: Affine, extents: Sequence[sint]) -> list[Affine]:
        made = []
        for extent in reversed(extents[1:]):
            assert isinstance(extent, int)
            whole, digit = self.divmod(whole, extent)
            made.append(digit)
        return [whole, *reversed(made)]

    def divmod(self, index: Affine, by: int) -> tuple[Affine, Affine]:
        """Quotient and remainder of a division."""
        while True:
            index = self.resolve(index)
            rest = {r: s for r, s in index.strides.items() if s % by}
            # windows have strides such as by + 1: their steps are one in the quotient and one in the rest
            for part in (rest, {r: s % by for r, s in rest.items()}):
                least, most = self.bounds(digit := Affine(index.offset % by, part))
                if least >= 0 and most < by:
                    whole = {r: (s - part.get(r, 0)) // by for r, s in index.strides.items()}
                    return Affine(index.offset // by, {r: s for r, s in whole.items() if s}), digit
            for number, stride in rest.items():
                extent = self.extents[number]
                if isinstance(extent, int) and stride > 0 and by % stride == 0 and by < stride * extent \
                        and extent % (by // stride) == 0:
                    self.divide(number, by // stride)
                    break
            else: raise NotAffine("a view with no strides of its own")

    # **** elementwise ops and memory ****

    def over(self, result: Sequence[sint], argument: Sequence[sint], indices: Indices) -> Indices:
        """The indices of an argument of an elementwise op, which may be broadcast."""
        indices = indices[len(indices) - len(argument):]
        result = result[len(result) - len(argument):]
        return tuple(ZERO if same(own, 1) and not same(out, 1) else index
                     for index, own, out in zip(indices, argument, result, strict=True))

    def lies(self, shape: Sequence[sint], indices: Indices) -> Affine:
        """The element of a dense tensor, in whose storage symbolic extents are the largest."""
        return self.resolve(_combine([largest(extent) for extent in shape], indices))


def _add_offset(index: Affine, offset: sint) -> Affine:
    if isinstance(offset, UOp): raise NotAffine("an offset known only when it runs")
    return Affine(index.offset + offset, index.strides) if offset else index


def _flip(index: Affine, extent: sint) -> Affine:
    if isinstance(extent, UOp): raise NotAffine("a flip of symbolic extent")
    return Affine(extent - 1 - index.offset, {r: -s for r, s in index.strides.items()})


def _combine(shape: Sequence[sint], indices: Indices) -> Affine:
    offset, strides, pitch = 0, dict[int, int](), prod(shape[:0])
    for extent, index in zip(reversed(shape), reversed(indices), strict=True):
        offset += index.offset * pitch
        for number, stride in index.strides.items():
            strides[number] = strides.get(number, 0) + stride * pitch
        assert isinstance(extent, int)
        pitch *= extent
    return Affine(offset, strides)
