"""The online softmax of float32 attention: as flash_score.py has it, without a rounding that 16-bit
probabilities hide.

Protocol: that of `OnlineSoftmax`, but

    rescale = 2^(factor · (old row_max − row_max))
    p       = 2^(factor · (cell − row_max))     exactly 1 for the largest

One instruction more for each score than an exponent of one fma, whose rounded product leaves the largest a
little off 1: a row that sees one column is that column's value, to the bit. Differences of near numbers are
exact, however large these are. While a row has seen nothing 0 is subtracted in place of its max.
"""
from __future__ import annotations

import math

from tinygrad_nv.ptx.builder import Value
from tinygrad_nv.tile.attention.score import AccFragment, OnlineSoftmax


class ExactSoftmax(OnlineSoftmax):
    """The softmax, with exponents of differences."""

    def step(self, cells: AccFragment) -> list[Value]:
        """Cells become powers of two; returns the factors that rescale each row's sums so far."""
        kb, rescales = self.kb, []
        for number, row_max in enumerate(self.row_max):
            row = [cell[2 * (number % 2) + e] for cell in cells[number // 2] for e in range(2)]
            new = self._row_max_update(row, row_max)
            safe = self.base(new)
            rescales.append(self.weight(row_max, safe))
            row_max.set(new)
            for value in row: value.set(self.weight(value, safe))
            row_sum = self.row_sum[number]
            kb.emit("fma.rn.f32", row_sum, row_sum, rescales[-1], row[0])
            for value in row[1:]: row_sum += value
        return rescales

    def base(self, row_max: Value) -> Value:
        """Returns the number that is subtracted from scores."""
        return self.kb.select(row_max == -math.inf, 0.0, row_max)

    def weight(self, score: Value, base: Value) -> Value:
        """2^(factor · (score − base)); results below 2^-126 are 0."""
        made = self.kb.reg("f32")
        self.kb.emit("ex2.approx.ftz.f32", made, (score - base) * self.factor)
        return made
