"""What becomes of the sums of a block before the softmax: the score, and the mask.

Protocol: `finish(sums, column, masked)` makes the sums of the block that begins at `column` scores, up to
the factor `scale` (which includes log2 e, as the softmax is in base 2): −inf where the row does not see the
column. A score that is the sum times a positive number costs nothing: the number is the factor. Others are
evaluated by epilogue.py, with the same numbers for rows (0, or 8 further on) and columns (of the thread's
first) as fragments have; what they load is read where it is, and where row or column do not exist, is 0.

A thread's columns begin at 2q of the block (q = lane % 4). `first` and `last` are the columns that a row
sees, relative to that: a column is masked by one comparison and one choice on each side.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advanced, read
from tinygrad_nv.tile.epilogue import Finish
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Sum
from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.templates.flash_wgmma_blocks import Blocks, Extent

LOG2_E = math.log2(math.e)


def constant_factor(score: Expression) -> float | None:
    """The positive number that a score is the sum times; None where it is something else."""
    if score == Sum(): return 1.0
    if not isinstance(score, Apply) or score.op != "mul": return None
    for one, other in (score.args, score.args[::-1]):
        inner = constant_factor(one)
        if inner is not None and isinstance(other, Constant) and 0 < inner * other.value < math.inf:
            return inner * other.value
    return None


class Scores:
    """Scores of a thread: `row` is its first row (s32), the other is 8 further on; `batch` the indices of its
    head."""

    def __init__(self, k: Kernel, score: Expression, blocks: Blocks, row: Value, rows: Extent,
                 batch: Sequence[Value], extras: Sequence[Value], start: Extent) -> None:
        factor = constant_factor(score)
        self.k, self.score, self.plain = k, score, factor is not None
        self.scale = (factor or 1.0) * LOG2_E
        self.blocks, self.row, self.rows, self.batch, self.extras = blocks, row, rows, batch, extras
        self.own = ((k.special("laneid") & 3) << 1).to("s32")
        self._see(start)

    def _see(self, start: Extent) -> None:
        """The first and the last column that each row sees, from the thread's own on."""
        k, band = self.k, self.blocks.plan.spec.band
        self.first: list[Value] = []
        self.last: list[Value] = []
        at = self.row + start - self.own
        if band.first is not None: self.first = [at + (8 * row + band.first) for row in range(2)]
        if not self.blocks.masks_right: return
        end = k.reg("s32", self.blocks.s_kv - 1) - self.own
        for row in range(2):
            last = end
            if band.last is not None:
                last = k.reg("s32")
                k.emit("min.s32", last, end, at + (8 * row + band.last))
            self.last.append(last)

    def finish(self, sums: Sequence[Value], column: Value, masked: bool) -> None:
        """Sums become scores."""
        if not self.plain: self._evaluate(sums, column)
        if not masked: return
        for side, test in ((self.last, "gt"), (self.first, "lt")):
            if not side: continue
            bounds = [bound - column for bound in side]
            for i, each in enumerate(sums):
                outside = self.k.reg("pred")
                # column > last is last < column
                opposite = {"gt": "lt", "lt": "gt"}[test]
                self.k.emit(f"setp.{opposite}.s32", outside, bounds[i >> 1 & 1], 8 * (i >> 2) + (i & 1))
                self.k.emit("selp.f32", each, -math.inf, each, outside)

    def _evaluate(self, sums: Sequence[Value], column: Value) -> None:
        block = _Block(self, sums, column)
        made = Finish(self.k, self.score, block)
        values = [made.at(i >> 1 & 1, 8 * (i >> 2)) for i in range(0, len(sums), 2)]
        for i, each in enumerate(sums): each.set(values[i // 2].register(i % 2))


class _Block:
    """What the score of one block reads (epilogue.Sources); a pair is named by its first column from the
    thread's own on."""

    def __init__(self, scores: Scores, sums: Sequence[Value], column: Value) -> None:
        self.k, self.scores, self.all = scores.k, scores, sums
        self.column = column + scores.own
        self.bases: dict[Load, Value] = {}
        self.inside: dict[tuple[str, int], Value] = {}

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]:
        first = pair // 8 * 4 + row * 2
        return self.all[first:first + 2]

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        if axis == "m": return [self.scores.row + 8 * row]
        if axis == "n": return [self.column + (pair + i) for i in range(2)]
        return [self.scores.batch[int(axis)]]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        if load not in self.bases: self.bases[load] = self._base(load)
        base, size = self.bases[load], load.dtype.itemsize
        at = (8 * row * load.m + pair * load.n) * size
        if not load.n: return read(self.k, base, at, load.dtype, 1, self._guard(load, row, None))
        return Lanes(self.k, load.dtype, [read(self.k, base, at + i * load.n * size, load.dtype, 1,
                                               self._guard(load, row, pair + i)).at(0) for i in range(2)])

    def _base(self, load: Load) -> Value:
        """The address of the thread's first element."""
        k, size = self.k, load.dtype.itemsize
        base = self.scores.extras[load.parameter]
        if load.offset: base = base + load.offset * size
        strides = [*(load.batch or (0, 0, 0)), load.m, load.n]
        for index, stride in zip((*self.scores.batch, self.scores.row, self.column), strides, strict=True):
            base = advanced(k, base, index.to("u32"), stride * size)
        return base

    def _guard(self, load: Load, row: int, column: int | None) -> Value | None:
        """Whether the element exists."""
        found = [self._below("m", self.scores.row, 8 * row, self.scores.rows)] if load.m else []
        if column is not None: found.append(self._below("n", self.column, column, self.scores.blocks.s_kv))
        return found[0] & found[1] if len(found) == 2 else found[0] if found else None

    def _below(self, axis: str, index: Value, more: int, bound: Extent) -> Value:
        key = axis, more
        if key not in self.inside: self.inside[key] = index + more < bound
        return self.inside[key]
