"""Views: where the elements of a tile are, in C.

Protocol: a `View` is a pointer to elements of a dtype in the format of memory, `strides` elements apart along
each axis. The last axis of an array is padded to whole vectors, and `SLACK` elements follow, so that a vector
may be read or written from any of its columns on. Outer indices and columns are C expressions.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.kernel import c_type, up
from tinygrad_nv.tile.expression import short

ROWS, VECTORS = 16, 2   # rows, and vectors of columns, to which arrays are padded: a dot's block of registers


@dataclass(frozen=True)
class View:
    """A tile in memory: of a strip's rows alone where it is an array of these, the `first` in C."""
    base: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: str = field(default="", kw_only=True)

    def at(self, outer: Sequence[str], column: str) -> str:
        """The address of an element."""
        places = [*outer, column]
        if self.first: places[0] = f"{places[0]} - {self.first}"
        terms = [self.base, *(f"({index}) * {stride}ll" for index, stride in
                              zip(places, self.strides, strict=True) if stride and index != "0")]
        return " + ".join(terms)

    def read(self, outer: Sequence[str], column: str, uniform: bool) -> str:
        """A vector from a column on; of a `uniform` one, and of one column, all lanes are the
        column's element."""
        name, last = short(self.dtype), self.strides[-1] if self.strides else 0
        where = self.at(outer, column) if self.shape else self.base
        if uniform or not last or self.shape[-1] == 1: return f"({vector(self.dtype)})one_{name}({where})"
        if last == 1: return f"load_{name}({where})"
        return f"strided_{name}({where}, {last}, {self.shape[-1]} - ({column}))"

    def write(self, outer: Sequence[str], column: str, value: str, count: str = "") -> str:
        """Stores a vector from a column on, its first `count` lanes alone where that is given."""
        name, where = short(self.dtype), self.at(outer, column) if self.shape else self.base
        if count == "1" and self.dtype.itemsize == 4: return f"*({where}) = ({value})[0];"
        if count: return f"store_n_{name}({where}, {value}, {count});"
        return f"store_{name}({where}, {value});"

    def transpose(self, order: Sequence[int]) -> View:
        """Returns the view with its axes in another order."""
        return replace(self, shape=tuple(self.shape[i] for i in order),
                       strides=tuple(self.strides[i] for i in order))

    def reshape(self, shape: tuple[int, ...]) -> View | None:
        """The same elements in another shape; None where strides cannot say that."""
        groups = _groups(self.shape, shape)
        strides = list[int]()
        for old, new in groups:
            extents = [(self.shape[i], self.strides[i]) for i in old if self.shape[i] > 1]
            if any(a[1] != b[0] * b[1] for a, b in itertools.pairwise(extents)): return None
            step, made = extents[-1][1] if extents else 0, list[int]()
            for i in reversed(new):
                made.insert(0, step if shape[i] > 1 else 0)
                step *= shape[i]
            strides += made
        return replace(self, shape=shape, strides=tuple(strides))


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Axes that hold the same elements, in order: as few as there can be in each group."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right, a, b = list[int](), list[int](), 1, 1
        while not (left and right) or a != b:
            take_old = i < len(old) and (j == len(new) or (a <= b if left else True))
            if take_old:
                left.append(i)
                a, i = a * old[i], i + 1
            elif j < len(new):
                right.append(j)
                b, j = b * new[j], j + 1
            else: break
        groups.append((left, right))
    return groups


def array(name: str, dtype: DType, shape: tuple[int, ...], lanes: int, dots: bool) -> tuple[View, str, int]:
    """An array for a tile: how it is seen, its declaration, and its bytes. `dots`: a dot may read it."""
    pitch = up(shape[-1], VECTORS * lanes)
    rows = 1
    for extent in shape[:-1]: rows *= extent
    padded = rows + ROWS if dots and len(shape) == 2 else rows
    strides = [1, pitch]
    for extent in reversed(shape[1:-1]): strides.append(strides[-1] * extent)
    count = padded * pitch + VECTORS * lanes
    made = View(name, dtype, shape, tuple(reversed(strides[:len(shape)])))
    return made, f"{c_type(dtype)} {name}[{count}] __attribute__((aligned(64)));", count * dtype.itemsize


def vector(dtype: DType) -> str:
    """The C type of a vector of a dtype's values."""
    return "vf" if dtypes.is_float(dtype) else "vi"
