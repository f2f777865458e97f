"""The band of an attention's mask, and the blocks of one side that it leaves a tile of the other.

Protocol: row r stands at place r + start among the keys, and sees the keys r + start + first … r + start +
last of those that there are. Seen from the other side key c stands at place c − start among the rows, and is
seen by the rows c − start − last … c − start − first: the transposed band. A `BlockRange` is of a tile of
either side, and tells of the elements of the other

    visible()   those that some of the tile sees, or is seen by, and no others
    full()      those that all of it does

and of the blocks of `block` elements those that have any (`first_block` … `end_block` − 1), and those that
need no mask (`first_plain` … `end_plain` − 1). A tile of one element has its own range in `full`.

Integers are Python's or numpy's (`INTEGERS`), registers (score.py), or C (cpu/attention/score.py): they add
and subtract, and `Arithmetic` has the rest. Each call makes, or emits, its numbers anew, and constants are
added up before they are added to a register.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Number = Any    # an int, an array of ints, a register (s32), an expression of C; a bound that is none: None


@dataclass(frozen=True)
class Band:
    """The columns that a row sees, relative to where it stands: first … last; None is no bound. Causal:
    last = 0. A window of w tokens: first = 1 − w, last = 0."""
    first: int | None = None
    last: int | None = None

    @property
    def full(self) -> bool:
        """Whether every row sees every column."""
        return self.first is None and self.last is None

    @property
    def empty(self) -> bool:
        """Whether no row sees any column."""
        return self.first is not None and self.last is not None and self.first > self.last

    def transpose(self) -> Band:
        """Returns the rows that see a column, relative to where it stands."""
        return Band(None if self.last is None else -self.last, None if self.first is None else -self.first)

    def __str__(self) -> str:
        if self.full: return "full"
        if self.last == 0: return "causal" if self.first is None else f"window {1 - self.first}"
        first, last = ("" if end is None else str(end) for end in (self.first, self.last))
        return f"band {first}…{last}"


FULL = Band()


@dataclass(frozen=True)
class Arithmetic:
    """The smaller and the larger of two numbers, and a quotient of one that is not negative."""
    smaller: Callable[[Number, Number], Number]
    larger: Callable[[Number, Number], Number]
    quotient: Callable[[Number, int], Number]


INTEGERS = Arithmetic(np.minimum, np.maximum, lambda number, by: number // by)


@dataclass(frozen=True)
class Interval:
    """Elements begin … end − 1; None is no bound."""
    begin: Number
    end: Number

    def misses(self, first: Number, count: int) -> Number:
        """Whether some of `count` elements from `first` on are none of these; None where that cannot be."""
        late = None if self.end is None else first + count > self.end
        early = None if self.begin is None else first < self.begin
        return late if early is None else early if late is None else late | early

    def has(self, element: Number) -> Number:
        """Whether an element is one of these; None where all are."""
        before = None if self.end is None else self.end > element
        after = None if self.begin is None else self.begin <= element
        return before if after is None else after if before is None else before & after


@dataclass(frozen=True)
class BlockRange:
    """The elements of the other side, `least` … `extent` − 1, for a tile that stands at the places `top` +
    `offset` … `bottom` + `offset` + `size` − 1 among them; `extent` None: no end that has to be looked at."""
    numbers: Arithmetic
    band: Band
    top: Number
    bottom: Number
    extent: Number
    block: int = 1
    offset: int = 0
    size: int = 0
    least: Number = 0

    @staticmethod
    def of_rows(numbers: Arithmetic, band: Band, row: Number, rows: int, s_q: Number, s_kv: Number,
                start: Number, block: int = 1) -> BlockRange:
        """Returns the keys for the rows from `row` on, as many of `rows` as there are."""
        return _of_tile(numbers, band, row, rows, s_q, s_kv, start, 1, block)

    @staticmethod
    def of_keys(numbers: Arithmetic, band: Band, key: Number, keys: int, s_q: Number, s_kv: Number,
                start: Number, block: int = 1) -> BlockRange:
        """Returns the rows for the keys from `key` on, as many of `keys` as there are."""
        return _of_tile(numbers, band.transpose(), key, keys, s_kv, s_q, start, -1, block)

    def visible(self) -> Interval:
        """The elements that some of the tile sees; its end is not below `least`."""
        numbers, (first, last) = self.numbers, (self.band.first, self.band.last)
        begin = self.least if first is None else numbers.larger(self._top(first), self.least)
        if self.band.empty: return Interval(begin, self.least)
        if last is None: return Interval(begin, self.extent)
        end = self._bottom(last)
        if self.extent is not None: end = numbers.smaller(end, self.extent)
        return Interval(begin, numbers.larger(end, self.least))

    def full(self) -> Interval:
        """The elements that all of the tile sees; they may begin before `least`."""
        first, last, end = self.band.first, self.band.last, self.extent
        if last is not None:
            end = self._top(last + 1)
            if self.extent is not None: end = self.numbers.smaller(end, self.extent)
        return Interval(None if first is None else self._bottom(first - 1), end)

    def first_block(self, visible: Interval) -> Number:
        """The block with the first of the elements that are seen."""
        return self.numbers.quotient(visible.begin, self.block)

    def end_block(self, visible: Interval) -> Number:
        """The block after the one with the last of them; where nothing is seen there may be one for nothing.
        """
        return self.numbers.quotient(visible.end + (self.block - 1), self.block)

    def first_plain(self, full: Interval) -> Number:
        """The first block that needs no mask, if any does not."""
        begin = 0 if full.begin is None else self.numbers.larger(full.begin, 0) + (self.block - 1)
        return self.numbers.quotient(begin, self.block)

    def end_plain(self, full: Interval) -> Number:
        """The block after the last that needs none."""
        return self.numbers.quotient(self.numbers.larger(full.end, 0), self.block)

    def _top(self, number: int) -> Number:
        number += self.offset
        return self.top + number if number else self.top

    def _bottom(self, number: int) -> Number:
        number += self.offset + self.size
        return self.bottom + number if number else self.bottom


def _of_tile(numbers: Arithmetic, band: Band, first: Number, count: int, most: Number, extent: Number,
             start: Number, sign: int, block: int) -> BlockRange:
    """Returns the range of `count` elements from `first` on, of `most`, that stand `start` further on, or
    back."""
    if band.full: return BlockRange(numbers, band, first, first, extent, block)
    known, whole = isinstance(start, int), isinstance(most, int) and most % count == 0

    def place(element: Number) -> Number:
        return element if known else element + start if sign > 0 else element - start
    top = place(first)
    bottom = top if whole else place(numbers.smaller(first + count, most))
    return BlockRange(numbers, band, top, bottom, extent, block, sign * start if known else 0,
                      count if whole else 0)
