"""Columns of a strip that masks hide: they are not computed.

Protocol: `find_hidden(region, strips, makers, lanes)` is of a loop's body whose masks have `skip`
(language/masks.py): what they make -inf changes nothing. A condition that compares the column's index with
the row's, or with a number, gives the first or the last column that some row of a strip sees. `values` are
those of which no other columns are computed: the scores, and what is made of them element by element; sums,
maxima and dots of them go over these columns alone.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.language.strips import ELEMENTS, Strips
from tinygrad_nv.tile.language.ir import Op, Region, Value
from tinygrad_nv.tile.language.unmasked import constant_of

ROW, COLUMN = -2, -1     # axes of a tile of scores
FOLLOWED = (*ELEMENTS, "if")
Makers = Mapping[Value, Op]


@dataclass
class Index:
    """Sum of a number, scalars and indices along axes, with how often each is added."""
    number: int = 0
    scalars: list[Value] = field(default_factory=list)
    axes: Counter[int] = field(default_factory=Counter)

    @property
    def of_row(self) -> bool: return set(self.axes) <= {ROW} and self.axes[ROW] <= 1

    @property
    def of_column(self) -> bool: return self.axes == Counter((COLUMN,))


@dataclass(frozen=True)
class Visible:
    """left < right + more, where an element is visible."""
    left: Index
    right: Index
    more: int

    @property
    def is_end(self) -> bool:
        """Whether it says which columns are the last, not the first."""
        return self.left.of_column


@dataclass(frozen=True)
class Hidden:
    """Bounds of a strip's columns, and values that have these columns alone."""
    bounds: tuple[Visible, ...]
    values: Set[Value]


def find_hidden(region: Region, strips: Strips, makers: Makers, lanes: int) -> Hidden | None:
    """Returns the columns that a strip need not compute; None where it needs all."""
    masks = [op for each in strips.ops for op in (each, *_inner(each)) if op.attributes.get("skip")]
    bounds = [bound for mask in masks for bound in _conditions(mask.operands[0], makers)
              if _bounds_columns(bound)]
    if not bounds or masks[0].result.shape[1] % lanes: return None
    shape = masks[0].result.shape
    values = _follow(region, {each.result for each in masks}, shape)
    return Hidden(tuple(bounds), values) if values else None


def _inner(op: Op) -> list[Op]: return [each for region in op.regions for each in region.walk()]


def _follow(region: Region, values: set[Value], shape: tuple[int, ...]) -> set[Value]:
    """Returns masked scores, all that is made of them element by element, and what they alone are made of;
    empty where something else needs all columns."""
    ops, before = [*region.walk()], 0
    while before != len(values):
        before = len(values)
        for op in ops:
            read = op.name in FOLLOWED and any(each in values for each in _operands(op))
            if read: values.update(op.results)
        for op in ops:
            if op.name not in ("dot", *FOLLOWED) or op.result.shape != shape: continue
            readers = [each for each in ops if op.result in _operands(each)]
            if readers and all(each.name in FOLLOWED and set(each.results) <= values for each in readers):
                values.update(op.results)
    if any(each.shape != shape for each in values) or values & set(region.yields): return set()
    good = all(_may_leave_out(op, values) for op in ops if any(each in values for each in op.operands))
    return values if good else set()


def _operands(op: Op) -> list[Value]:
    return [*op.operands, *(each for inner in op.regions for each in inner.yields)]


def _may_leave_out(op: Op, values: Set[Value]) -> bool:
    """Whether an operation may read some columns alone."""
    if op.name == "reduce": return not op.regions and op.attributes["axis"] == 1
    if op.name == "dot":    # of bytes all columns are corrected for signs
        return op.operands[0].dtype.itemsize > 1 and not any(each in values for each in op.operands[1:])
    return op.name in ELEMENTS


def _conditions(value: Value, makers: Makers) -> list[Visible]:
    """Comparisons that all hold where a condition does, of those of indices."""
    op = makers.get(value)
    if op is None: return []
    if op.name in ("broadcast", "reshape"):
        source = op.operands[0]
        stays = op.name == "broadcast" or op.result.shape[-len(source.shape):] == source.shape
        return _conditions(source, makers) if stays else []
    if op.name != "apply": return []
    fn = op.attributes["fn"]
    if fn == "and": return [each for one in op.operands for each in _conditions(one, makers)]
    if fn == "less": return _compare(op.operands, 0, makers)
    if fn == "xor" and constant_of(op.operands[1], makers) is True:
        inner = makers.get(op.operands[0])
        if inner is not None and inner.name == "apply" and inner.attributes["fn"] == "less":
            return _compare(inner.operands[::-1], 1, makers)
    return []


def _compare(sides: Sequence[Value], more: int, makers: Makers) -> list[Visible]:
    if sides[0].dtype != dtypes.int32: return []
    left, right = (_index(each, makers) for each in sides)
    return [] if left is None or right is None else [Visible(left, right, more)]


def _bounds_columns(each: Visible) -> bool:
    """Whether one side has the column's index, the other no more than the row's."""
    left, right = each.left, each.right
    return (left.of_column and right.of_row) or (left.of_row and right.of_column)


def find_ends(mask: Value, makers: Makers) -> list[Visible]:
    """Returns comparisons of a mask that hold up to an index along the first axis alone."""
    op, first = makers.get(mask), Counter((-len(mask.shape),))
    if op is not None and op.name in ("broadcast", "reshape"):
        source = op.operands[0]
        stays = op.name == "reshape" or len(source.shape) == len(mask.shape)
        return find_ends(source, makers) if stays and source.shape[:1] == mask.shape[:1] else []
    if op is not None and op.name == "apply" and op.attributes["fn"] == "and":
        return [each for one in op.operands for each in find_ends(one, makers)]
    return [each for each in _conditions(mask, makers) if each.left.axes == first and not each.right.axes]


def _index(value: Value, makers: Makers) -> Index | None:
    """A tile of integers as a sum; None of others."""
    known, op = constant_of(value, makers), makers.get(value)
    if isinstance(known, int): return Index(known)
    if not value.shape: return Index(0, [value])
    if op is None: return None
    if op.name == "iota": return Index(axes=Counter((COLUMN,) * (value.shape != (1,))))
    if op.name == "broadcast": return _index(op.operands[0], makers)
    if op.name == "reshape": return _reshape_index(_index(op.operands[0], makers), op)
    if op.name != "apply" or op.attributes["fn"] not in ("add", "sub"): return None
    a, b = (_index(each, makers) for each in op.operands)
    if a is None or b is None: return None
    if op.attributes["fn"] == "add": return Index(a.number + b.number, a.scalars + b.scalars, a.axes + b.axes)
    return None if b.scalars or b.axes else Index(a.number - b.number, a.scalars, a.axes)


def _reshape_index(index: Index | None, op: Op) -> Index | None:
    """The sum along the axes of the result; None where one of its axes is not there."""
    if index is None: return None
    source, shape = op.operands[0].shape, op.result.shape
    axes = Counter[int]()
    for axis, count in index.axes.items():
        place = source[axis], _stride(source, axis)
        found = [each for each in range(-len(shape), 0) if (shape[each], _stride(shape, each)) == place]
        if not found: return None
        axes[found[0]] = count
    return Index(index.number, index.scalars, axes)


def _stride(shape: Sequence[int], axis: int) -> int: return math.prod(shape[len(shape) + axis + 1:])
