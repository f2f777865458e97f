"""Rows of a decode kernel: where they stand, their queries, scores and softmax.

Protocol: a warp has 16 rows, row number r of a key head being row r // group of query head r % group; a lane
has rows g and g + 8 of these, g = lane / 4. Rows beyond the last see nothing and are never stored.

    t       = score(sum) · log2 e        −inf where the row does not see the key
    row_max = max(row_max, t)            of a row: its four lanes have the same
    rescale = 2^(old row_max − row_max)
    p       = 2^(t − row_max)
    row_sum = row_sum · rescale + Σ p    of the lane's own columns

This is the online softmax of Milakov and Gimelshein (2018) in base 2. t is rounded before the max is taken
from it, so that p is at most 1 however large the scores are. While a row has seen nothing 0 is subtracted in
place of its max, −inf.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, read
from tinygrad_nv.tile.attention.score import across
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Sum, loads
from tinygrad_nv.tile.lanes import Lanes

LOG2E, LARGEST = math.log2(math.e), (2 - 2.0**-23) * 2.0**127
AccFragment = list[list[Value]]  # by 8 columns: registers of columns 2q, 2q + 1 of row g, then of row g + 8


def multiple(score: Expression) -> float | None:
    """The number by which a score is the sum's multiple; None where it is another expression."""
    if score == Sum(): return 1.0
    if not isinstance(score, Apply) or score.op != "mul": return None
    for one, other in (score.args, score.args[::-1]):
        if isinstance(one, Constant) and (inner := multiple(other)) is not None:
            return inner * float(one.value)
    return None


def base_of(kb: Kernel, row_max: Value) -> Value:
    """The subtrahend of scores: the max, or 0 for −inf."""
    return kb.select(row_max == -math.inf, 0.0, row_max)


def power(kb: Kernel, exponent: Value) -> Value:
    """2^x."""
    made = kb.reg("f32")
    # without ftz three instructions more, for results below 2^-126
    kb.emit("ex2.approx.ftz.f32", made, exponent)
    return made


@dataclass
class LaneRows:
    """A lane's two rows, the first of them number `first` (u32) of the key head. `length` (s32) is the
    request's, `batch` are request and key head (u32)."""
    kb: Kernel
    spec: DecodeSpec
    first: Value
    length: Value
    batch: Sequence[Value]

    def __post_init__(self) -> None:
        kb, spec = self.kb, self.spec
        self.number = [self.first + 8 * h if h else self.first for h in range(2)]
        self.there = [number < spec.rows for number in self.number]
        self.head = [number % spec.group for number in self.number]
        self.row = [number // spec.group for number in self.number]
        # how many keys the row sees: its own place, and 1; 0 for rows beyond the last
        places = [self.length + (row.to("s32") - (spec.s_q - 1)) if spec.causal else self.length
                  for row in self.row]
        self.seen = [kb.select(there, place, 0, "s32")
                     for there, place in zip(self.there, places, strict=True)]
        if spec.chunked: self.low = [self._chunk(seen - 1) for seen in self.seen]

    def _chunk(self, place: Value) -> Value:
        """The first key of a place's chunk."""
        place = place.to("u32")
        return (place - place % (self.spec.window or 1)).to("s32")

    def queries(self, pointer: Value) -> list[list[Value]]:
        """Fragments of q, for each 16 elements of the head; 0 beyond the last row."""
        kb, spec, q = self.kb, self.spec, self.spec.q
        lane, at = self.kb.special("laneid"), []
        for row, head in zip(self.row, self.head, strict=True):
            elements = kb.reg("u64", q.offset)
            for index, stride in zip((*self.batch, head, row), (*q.batch, q.row), strict=True):
                elements = elements + index.to("u64") * stride
            elements = elements + (lane % 4 * (4 if spec.is_quantised else 2)).to("u64")
            at.append(pointer + elements * 2)
        made = []
        for step in range(0, spec.d, 16):
            four = kb.regs("b32", 4, 0)
            for h in range(2):
                if spec.is_quantised:
                    kb.emit("ld.global.v2.b32", [four[h], four[h + 2]], at[h].at(2 * step),
                           guard=self.there[h])
                    continue
                for half in range(2):
                    kb.emit("ld.global.b32", four[h + 2 * half], at[h].at(2 * step + 16 * half),
                           guard=self.there[h])
            made.append(four)
        return made


class DecodeSoftmax:
    """Scores and weights of a lane's rows."""

    def __init__(self, kb: Kernel, spec: DecodeSpec, rows: LaneRows, extras: Sequence[Value]) -> None:
        self.kb, self.spec, self.rows = kb, spec, rows
        self.scale = multiple(spec.score)
        self.loaded = {load: [_Loaded(kb, spec, load, extras[load.parameter], rows, h) for h in range(2)]
                       for load in loads(spec.score)}
        self.row_max, self.row_sum = kb.regs("f32", 2, -math.inf), kb.regs("f32", 2, 0.0)

    def step(self, sums: AccFragment, first: Value) -> list[Value]:
        """Sums of keys from `first` (s32) on become weights; returns the factors that rescale each row's sums
        so far."""
        kb = self.kb
        column = first + (kb.special("laneid") % 4 * 2).to("s32")
        cells, rescales = self._scores(sums, column), []
        for h, row_max in enumerate(self.row_max):
            seen, row = self.rows.seen[h] - column, list[Value]()
            low = self.rows.low[h] - column if self.spec.chunked else None
            for j, cell in enumerate(cells):
                for e in range(2): row.append(self._mask_scores(cell[2 * h + e], seen, low, 8 * j + e))
            new = kb.reg("f32", row_max)
            for value in row: kb.emit("max.f32", new, new, value)
            new = across(kb, new, "max.f32")
            base = base_of(kb, new)
            rescales.append(power(kb, row_max - base))
            row_max.set(new)
            for j, cell in enumerate(sums):
                for e in range(2): cell[2 * h + e].set(power(kb, row[2 * j + e] - base))
            self.row_sum[h] *= rescales[h]
            for cell in sums:
                for e in range(2): self.row_sum[h] += cell[2 * h + e]
        return rescales

    def row_sums(self) -> list[Value]:
        """The sums of whole rows."""
        return [across(self.kb, row_sum, "add.f32") for row_sum in self.row_sum]

    def _mask_scores(self, value: Value, seen: Value, low: Value | None, column: int) -> Value:
        """−inf where the row sees `seen` keys from the lane's first column on, of chunks those from `low` on,
        and this is not one."""
        sees = seen > column
        if low is not None: sees = sees & (low <= column)
        elif self.spec.window is not None: sees = sees & (seen <= column + self.spec.window)
        return self.kb.select(sees, value, -math.inf)

    def _scores(self, sums: AccFragment, column: Value) -> AccFragment:
        """Scores times log2 e, of which the lane's first column is that of key `column`."""
        if self.scale is not None: return [[value * (self.scale * LOG2E) for value in cell] for cell in sums]
        sources = _Pairs(self.kb, sums, lambda axis, h: self._position(axis, h, column), self.loaded, column)
        # one for each row: they differ in query heads, which it takes to be the same for all
        finishes = [EpilogueEmitter(self.kb, self.spec.score, sources) for _ in range(2)]
        return [[self._scale_scores(finish.at(h, j).register(e)) for h, finish in enumerate(finishes)
                 for e in range(2)] for j in range(len(sums))]

    def _scale_scores(self, score: Value) -> Value:
        """Times log2 e; the smallest numbers, with which some masks hide keys, do not become −inf."""
        kb, made = self.kb, self.kb.reg("f32")
        kb.emit("max.f32", made, score * LOG2E, -LARGEST)
        return kb.select(score == -math.inf, -math.inf, made)

    def _position(self, axis: str | int, h: int, column: Value) -> Value:
        """An index: s32; of keys, that of the lane's first column."""
        if axis == "m": return self.rows.seen[h] - 1
        if axis == "n": return column
        if axis == "start": return self.rows.length - self.spec.s_q
        return (self.rows.head[h] if axis == 2 else self.rows.batch[int(axis)]).to("s32")


class _Loaded:
    """A parameter of the score, as the lane's row `h` has it."""

    def __init__(self, kb: Kernel, spec: DecodeSpec, load: Load, pointer: Value, rows: LaneRows,
                 h: int) -> None:
        self.kb, self.load, self.seen, size = kb, load, rows.seen[h], load.dtype.itemsize
        base = pointer + load.offset * size if load.offset else pointer
        indices, strides = (*rows.batch, rows.head[h], rows.row[h]), (*(load.batch or (0, 0, 0)), load.m)
        for index, stride in zip(indices, strides, strict=True):
            base = advance(kb, base, index, stride * size)
        self.base = base
        # pairs begin at even keys; the last one has two where all keys that there are do
        even = not any(x % 2 for x in (spec.longest, load.m, load.offset, *load.batch))
        self.pairs = load.n == 1 and spec.length == "most" and even
        self.fixed = None if load.n else read(kb, base, 0, load.dtype, 1, rows.there[h])

    def at(self, column: Value, pair: int) -> Lanes:
        """Returns the values of a pair of keys, the lane's first of which is `column` (s32); 0 where the row
        does not see it."""
        if self.fixed is not None: return self.fixed
        kb, load, size = self.kb, self.load, self.load.dtype.itemsize
        base, after = advance(kb, self.base, column.to("u32"), load.n * size), self.seen - column
        if self.pairs: return read(kb, base, 8 * pair * size, load.dtype, 2, after > 8 * pair)
        return Lanes(kb, load.dtype, [read(kb, base, (8 * pair + e) * load.n * size, load.dtype, 1,
                                          after > 8 * pair + e).at(0) for e in range(2)])


@dataclass
class _Pairs:
    """Operands of a score, for pairs of columns: `row` 0 or 1 is the lane's row, `pair` counts 8 columns."""
    kb: Kernel
    cells: AccFragment
    index: Callable[[str | int, int], Value]
    loaded: Mapping[Load, Sequence[_Loaded]]
    column: Value

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: return self.cells[pair][2 * row:][:2]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        return self.loaded[load][row].at(self.column, pair)

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        made = self.index(axis, row)
        return [made + (8 * pair + e) for e in range(2)] if axis == "n" else [made]
