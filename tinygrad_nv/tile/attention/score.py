"""Scores, band and softmax of a block of attention, on fragments in registers.

Protocol: a warp holds cells, by 16 rows and by 8 columns; of a cell, registers 2h and 2h + 1 are row g + 8h,
columns 2q and 2q + 1 of it, g = lane / 4, q = lane % 4, as mma.m16n8 and wgmma leave them. For each block of
columns, in any order:

    cells = scores.of(sums, base)        the expression of the sums; `base` (s32) is the first column
    scores.mask(cells, base)             −inf outside the band; needed on its edge alone (blocks.py)
    rescale = softmax.step(cells)        cells become exp2(factor · (cell − row_max)); factors of sums so far

    row_max = max(row_max, cells)        of a row: its four lanes have the same
    rescale = 2^(factor · old row_max − factor · row_max)    exactly 1 where row_max stays
    p       = 2^(factor · cell − factor · row_max)
    row_sum = row_sum · rescale + Σ p    of a lane's own columns; `softmax.finish` adds those of the row

The online softmax of Milakov and Gimelshein (2018), in base 2. A score that is a positive multiple of the
sum costs nothing: `factor` is then that multiple times log2 e, else log2 e. While a row has seen nothing its
row_max is −inf and 0 is subtracted in its stead, so that −inf gives 0, never NaN.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.values import power_of_two
from tinygrad_nv.tile.access import advance, read
from tinygrad_nv.tile.attention.band import Arithmetic, BlockRange, Interval
from tinygrad_nv.tile.attention.spec import AttentionSpec, multiple
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Load
from tinygrad_nv.tile.lanes import Lanes

LOG2E, LN2 = math.log2(math.e), math.log(2)
LARGE = 2.0**28  # half a unit of such a product is 8: weights that should be 1 are up to 2^8, as f16 can be
LARGEST = (2 - 2.0**-23) * 2.0**127
AccFragment = list[list[list[Value]]]  # by 16 rows, by 8 columns: four registers


@dataclass
class Extents:
    """s_q, s_kv (u32) and start (s32) of a launch: parameters of the kernel, or constants; of a sequence of a
    ragged batch, with its first rows (u32) of q and of k."""
    s_q: Value | int
    s_kv: Value | int
    start: Value | int
    first: tuple[Value, Value] | None = None

    @staticmethod
    def declare_params(kb: Kernel, spec: AttentionSpec) -> Extents:
        """Declares those that are symbolic."""
        s_q, s_kv, start = (kb.param(name, "u32") if name in spec.symbolic else getattr(spec, name)
                            for name in ("s_q", "s_kv", "start"))
        return Extents(s_q, s_kv, start)

    @staticmethod
    def read(kb: Kernel, spec: AttentionSpec, cu: tuple[Value, Value], sequence: Value) -> Extents:
        """Reads those of a sequence (u32), where the arrays `cu` point. No more rows than the spec's, which
        the results have room for, and no fewer than 0: what is too long is cut off at its end."""
        firsts, counts = [], []
        for pointer, most in zip(cu, (spec.s_q, spec.s_kv), strict=True):
            at, (first, end) = advance(kb, pointer, sequence, 4), kb.regs("s32", 2)
            kb.emit("ld.global.s32", first, at.at())
            kb.emit("ld.global.s32", end, at.at(4))
            counts.append(_emit_s32(kb, "max.s32", _emit_s32(kb, "min.s32", end - first, most), 0))
            firsts.append(first.to("u32"))
        s_q, s_kv = counts
        return Extents(s_q.to("u32"), s_kv.to("u32"), s_kv - s_q, (firsts[0], firsts[1]))

    @property
    def s32(self) -> tuple[Value | int, Value | int, Value | int]:
        """The three as s32."""
        return as_s32(self.s_q), as_s32(self.s_kv), as_s32(self.start)


def to_signed(kb: Kernel, value: Value | int) -> Value:
    """A count as s32."""
    return value.to("s32") if isinstance(value, Value) else kb.reg("s32", value)


def as_s32(value: Value | int) -> Value | int:
    """A count as s32, where it is not known."""
    return value.to("s32") if isinstance(value, Value) and value.kind != "s32" else value


def is_whole(extent: Value | int, block: int) -> bool:
    """Whether an extent is known to be whole blocks."""
    return isinstance(extent, int) and extent % block == 0


def min_s32(kb: Kernel, a: Value | int, b: Value | int) -> Value | int:
    """The smaller of two s32, emitted where they are not known."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _emit_s32(kb, "min.s32", a, b)


def max_s32(kb: Kernel, a: Value | int, b: Value | int) -> Value | int:
    """The larger of two s32."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _emit_s32(kb, "max.s32", a, b)


def _emit_s32(kb: Kernel, opcode: str, a: Value | int, b: Value | int) -> Value:
    made = kb.reg("s32")
    kb.emit(opcode, made, *((b, a) if isinstance(a, int) else (a, b)))
    return made


def _quotient(number: Value | int, by: int) -> Value | int:
    """A quotient of an s32 that is not negative: a shift, or an unsigned product."""
    if isinstance(number, int): return number // by
    return number >> by.bit_length() - 1 if power_of_two(by) else (number.to("u32") // by).to("s32")


def registers(kb: Kernel) -> Arithmetic:
    """Returns the arithmetic of band.py on registers (s32)."""
    return Arithmetic(partial(min_s32, kb), partial(max_s32, kb), _quotient)


@dataclass
class Scores:
    """The score of a lane's elements. `first` (u32) is the warp's first row; `extras` the score's parameters,
    `batch` the indices (u32)."""
    kb: Kernel
    spec: AttentionSpec
    extents: Extents
    extras: Sequence[Value]
    batch: Sequence[Value]
    first: Value
    block_m: int
    block_n: int
    bases: dict[Load, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lane = self.kb.special("laneid")
        self.row, self.column = self.first + (lane >> 2), (lane & 3) << 1
        scale = multiple(self.spec.score)
        self.linear = scale is not None
        self.factor = LOG2E * (1.0 if scale is None else scale)
        self.finish: EpilogueEmitter | None = None
        self.inside: dict[tuple[str, int], Value] = {}

    def of(self, sums: AccFragment, base: Value) -> AccFragment:
        """The scores of a block's sums, which may be the same registers."""
        if self.linear: return sums
        kb = self.kb
        self.sums_of, self.at = sums, base.to("u32") + self.column
        self.inside = {key: value for key, value in self.inside.items() if key[0] == "row"}
        finish, made = EpilogueEmitter(kb, self.spec.score, self), []
        for i, row in enumerate(sums):
            made.append([[kb.reg("f32", value) for h in range(2)
                          for value in self._two(finish.at(16 * i + 8 * h, 8 * j))] for j in range(len(row))])
        return made

    def _two(self, value: Lanes) -> tuple[Value, Value]: return value.register(0), value.register(1)

    # **** what the expression reads: rows and columns are counted from the lane's own ****

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]:
        """A pair's sums."""
        half = 2 * (row // 8 % 2)
        return self.sums_of[row // 16][pair // 8][half:half + 2]

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        """Indices of the pair."""
        if axis == "m": return [(self.row + row).to("s32")]
        if axis == "n": return [(self.at + (pair + i)).to("s32") for i in range(2)]
        if axis == "start": return [to_signed(self.kb, self.extents.start)]
        return [self.batch[int(axis)].to("s32")]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        """Elements of a parameter; 0 outside."""
        kb, size = self.kb, load.dtype.itemsize
        if load not in self.bases: self.bases[load] = self._base(load)
        base = advance(kb, self.bases[load], self.at, load.n * size)
        at, on_row = (row * load.m + pair * load.n) * size, row if load.m else None
        if not load.n: return read(kb, base, at, load.dtype, 1, self._guard(on_row, None))
        s_kv = self.extents.s_kv
        whole = isinstance(s_kv, int) and s_kv % 2 == 0
        if load.n == 1 and whole and not any(x % 2 for x in (load.m, load.offset, *load.batch)):
            return read(kb, base, at, load.dtype, 2, self._guard(on_row, pair))
        return Lanes(kb, load.dtype, [read(kb, base, at + i * load.n * size, load.dtype, 1,
                                          self._guard(on_row, pair + i)).at(0) for i in range(2)])

    def prepare(self, loads: Sequence[Load]) -> None:
        """Addresses of the lane's first row, ahead of the loop."""
        for load in loads: self.bases[load] = self._base(load)

    def _base(self, load: Load) -> Value:
        size, made = load.dtype.itemsize, self.extras[load.parameter]
        if load.offset: made = made + load.offset * size
        for index, stride in zip(self.batch, load.batch or (0, 0, 0), strict=True):
            made = advance(self.kb, made, index, stride * size)
        return advance(self.kb, made, self.row, load.m * size)

    def _guard(self, row: int | None, column: int | None) -> Value | None:
        """A predicate that holds inside; None where all is."""
        found = None
        for name, own, offset, extent, block in (("row", self.row, row, self.extents.s_q, self.block_m),
                                                 ("column", None, column, self.extents.s_kv, self.block_n)):
            if offset is None or is_whole(extent, block): continue
            if (name, offset) not in self.inside:
                self.inside[name, offset] = ((self.at if own is None else own) + offset) < extent
            one = self.inside[name, offset]
            found = one if found is None else found & one
        return found

    # **** the band ****

    def mask(self, cells: AccFragment, base: Value, hidden: float = -math.inf) -> None:
        """`hidden` in columns that a row does not see."""
        kb, own = self.kb, base + self.column.to("s32")
        lane = self._lane_range(self.row.to("s32") - own, own)
        for i, row in enumerate(cells):
            for h in range(2):
                down = 16 * i + 8 * h
                seen = self._hide_missing(replace(lane, offset=lane.offset + down).full(), down)
                for j, cell in enumerate(row):
                    for e in range(2):
                        register = cell[2 * h + e]
                        kb.emit("selp.f32", register, register, hidden, seen.has(8 * j + e))

    def _lane_range(self, row: Value, own: Value) -> BlockRange:
        """Returns the columns that a lane's first row sees, both relative to its own first column."""
        s_kv, start = as_s32(self.extents.s_kv), as_s32(self.extents.start)
        return BlockRange.of_rows(registers(self.kb), self.spec.band, row, 1, 1, s_kv - own, start)

    def _hide_missing(self, seen: Interval, down: int) -> Interval:
        """Returns what the row sees that is `down` after the lane's first; rows that do not exist may see
        anything, since they are not stored."""
        return seen


@dataclass
class OnlineSoftmax:
    """Online softmax of a lane's rows, two for each 16 of the warp: the largest score so far, and the sum.
    The max is the largest itself, not one a little below that would move less often: its weight is 1, which
    nothing rounds, and rows of few large weights are the more exact for it. Weights, and their sum, are
    2^`lift` times as large. `factor` may be a register, of a positive number."""
    kb: Kernel
    tiles: int
    factor: float | Value
    lift: float = 0.0

    def __post_init__(self) -> None:
        self.row_max = self.kb.regs("f32", 2 * self.tiles, -math.inf)
        self.row_sum = self.kb.regs("f32", 2 * self.tiles, 0.0)

    def step(self, cells: AccFragment) -> list[Value]:
        """Cells become powers of two; returns the factors that rescale each row's sums so far."""
        kb, rescales = self.kb, []
        for number, row_max in enumerate(self.row_max):
            row = [cell[2 * (number % 2) + e] for cell in cells[number // 2] for e in range(2)]
            new = self._row_max_update(row, row_max)
            safe, rescale = kb.select(new == -math.inf, 0.0, new), kb.reg("f32")
            factor = self._factor(safe)
            scaled = safe * factor
            kb.emit("ex2.approx.ftz.f32", rescale, row_max * factor - scaled)
            row_max.set(new)
            minus = self.lift - scaled if self.lift else -scaled
            for value in row: value.set(self._power(value, factor, minus))
            row_sum = self.row_sum[number]
            kb.emit("fma.rn.f32", row_sum, row_sum, rescale, row[0])
            for value in row[1:]: row_sum += value
            rescales.append(rescale)
        return rescales

    def _row_max_update(self, row: Sequence[Value], row_max: Value) -> Value:
        """The new max of a row, in all four lanes that have it."""
        kb, made = self.kb, self.kb.reg("f32", row[0])
        for value in row[1:]: kb.emit("max.f32", made, made, value)
        most = across(kb, made, "max.f32")
        kb.emit("max.f32", most, most, row_max)
        return most

    def _factor(self, row_max: Value) -> Value:
        """The factor; for maxima beyond LARGE the power of two next to it, whose product with the max is
        exact: other products would be rounded by more than weights can bear. Scores below such a max are so
        far below that their weights are as good as 0 with either."""
        kb, size = self.kb, self.kb.reg("f32")
        kb.emit("abs.f32", size, row_max)
        if isinstance(self.factor, Value):  # the power of two next to a register: half a mantissa added
            power = kb.reg("b32")
            kb.emit("mov.b32", power, self.factor)
            kb.emit("add.u32", power, power, 0x00400000)
            kb.emit("and.b32", power, power, 0x7F800000)
            rounded = kb.reg("f32")
            kb.emit("mov.b32", rounded, power)
            return kb.select(size * self.factor > LARGE, rounded, self.factor)
        return kb.select(size > LARGE / self.factor, nearest_power(self.factor), self.factor, "f32")

    def _power(self, value: Value, factor: Value, minus: Value) -> Value:
        kb, made = self.kb, self.kb.reg("f32")
        kb.emit("fma.rn.f32", made, value, factor, minus)
        # without ftz three instructions more, for results below 2^-126
        kb.emit("ex2.approx.ftz.f32", made, made)
        return made

    def finish(self, sink: Value | None = None) -> tuple[list[Value], list[Value]]:
        """1 / row_sum of every row, 0 for rows that saw nothing, and l; `sink` is one more logit of all rows.
        """
        kb, inverses, logs = self.kb, [], []
        for row_max, row_sum in zip(self.row_max, self.row_sum, strict=True):
            whole = across(kb, row_sum, "add.f32")
            inverse, log = kb.regs("f32", 2)
            if sink is not None:
                self._apply_sink(row_max, whole, sink, inverse, log)
                inverses.append(inverse)
                logs.append(log)
                continue
            kb.emit("rcp.approx.ftz.f32", inverse, whole)
            inverses.append(kb.select(whole == 0.0, 0.0, inverse))
            kb.emit("lg2.approx.f32", log, whole)
            # not factor · row_max first, which may be too large where l is not
            kb.emit("fma.rn.f32", log, row_max, self.factor * LN2,
                   (log - self.lift if self.lift else log) * LN2)
            logs.append(log)
        return inverses, logs


    def _apply_sink(self, row_max: Value, row_sum: Value, sink: Value, inverse: Value, log: Value) -> None:
        """1 / (row_sum + the sink's weight) and l of a row, both relative to the larger of its max and its
        sink."""
        kb, hidden = self.kb, row_max == -math.inf
        safe, logit, base, weight, other = kb.select(hidden, 0.0, row_max), *kb.regs("f32", 4)
        scaled = kb.select(hidden, -math.inf, safe * self._factor(safe), "f32")
        kb.emit("min.f32", logit, sink * LOG2E, LARGEST)
        kb.emit("max.f32", base, scaled, logit)
        base.set(kb.select(base == -math.inf, 0.0, base))
        kb.emit("ex2.approx.ftz.f32", weight, scaled - base)
        kb.emit("ex2.approx.ftz.f32", other, logit - base)
        whole = row_sum * weight + other
        kb.emit("rcp.approx.ftz.f32", inverse, whole)
        inverse.set(kb.select(whole == 0.0, 0.0, inverse * weight))
        kb.emit("lg2.approx.f32", log, whole)
        log.set((log + base) * LN2)


def sink_of(kb: Kernel, spec: AttentionSpec, sinks: Value | None, batch: Sequence[Value]) -> Value | None:
    """The sink of a matrix of the batch (u32)."""
    if sinks is None or spec.sinks is None: return None
    at = sinks
    for index, stride in zip(batch, spec.sinks, strict=True): at = advance(kb, at, index, stride * 4)
    return kb.ld("global", "f32", at.at())[0]


def rescale(kb: Kernel, out: Sequence[Value], factors: Sequence[Value]) -> None:
    """Multiplies a wgmma's sums by the factors of their rows, unless all of the warp are 1: the further on,
    the more blocks leave the maxima of its rows as they are."""
    some = kb.reg("pred")
    kb.emit("vote.sync.any.pred", some, (factors[0] != 1.0) | (factors[1] != 1.0), -1)
    with kb.if_(some):
        for i, each in enumerate(out): each *= factors[i >> 1 & 1]


def nearest_power(x: float) -> float:
    """The power of two nearest to a positive number: of log2 e it is 1, which no max is too large for."""
    return 2.0**(math.floor(math.log2(x / 1.5)) + 1)


def across(kb: Kernel, value: Value, opcode: str) -> Value:
    """An operation over the four lanes of a row."""
    for distance in (1, 2):
        other, made = kb.regs("f32", 2)
        kb.emit("shfl.sync.bfly.b32", other, value, distance, 31, -1)
        kb.emit(opcode, made, value, other)
        value = made
    return value
