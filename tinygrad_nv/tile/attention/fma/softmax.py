"""The online softmax of float32 attention: as flash_score.py has it, without a rounding that 16-bit
probabilities hide.

Protocol: that of `Softmax`, but

    shrink = 2^(factor · (old top − top))
    p      = 2^(factor · (cell − top))          exactly 1 for the largest

One instruction more for each score than an exponent of one fma, whose rounded product leaves the largest a
little off 1: a row that sees one column is that column's value, to the bit. Differences of near numbers are
exact, however large these are. While a row has seen nothing 0 is subtracted in its top's stead.
"""
from __future__ import annotations

import math

from tinygrad_nv.ptx.builder import Value
from tinygrad_nv.tile.attention.score import Cells, Softmax


class ExactSoftmax(Softmax):
    """The softmax, with exponents of differences."""

    def step(self, cells: Cells) -> list[Value]:
        """Cells become powers of two; by what each row's sums so far shrink."""
        k, shrinks = self.k, []
        for number, top in enumerate(self.top):
            row = [cell[2 * (number % 2) + e] for cell in cells[number // 2] for e in range(2)]
            new = self._moved(row, top)
            safe = self.base(new)
            shrinks.append(self.weight(top, safe))
            top.set(new)
            for value in row: value.set(self.weight(value, safe))
            total = self.total[number]
            k.emit("fma.rn.f32", total, total, shrinks[-1], row[0])
            for value in row[1:]: total += value
        return shrinks

    def base(self, top: Value) -> Value:
        """What is subtracted from scores."""
        return self.k.select(top == -math.inf, 0.0, top)

    def weight(self, score: Value, base: Value) -> Value:
        """2^(factor · (score − base)); results below 2^-126 are 0."""
        made = self.k.reg("f32")
        self.k.emit("ex2.approx.ftz.f32", made, (score - base) * self.factor)
        return made
