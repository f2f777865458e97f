"""The two products of flash_fma: every lane multiplies a small matrix of its own, from registers.

Protocol. Of a warp's rows and columns a lane has

    sums of q kᵀ   rows g + 8 i, columns 2 q + 8 j and the next, g = lane / 4, q = lane % 4: the fragment of
                   mma.m16n8, which scores and softmax are written for
    sums of p v    rows g + 4 i, elements 4 q + 32 j and the next three, g = lane / 8, q = lane % 8

`ScoreMatmul` reads four elements of d of each of its rows and columns, 16 bytes a lane, and multiplies rows
by columns; `Outputs` reads four probabilities of each of its rows, and the elements of v of each of the four.
Probabilities go from the one to the other by way of shared memory, so that the second has twice the rows and
half the elements: 4 × 8 lanes read less of few long rows than 8 × 4 do. Shared memory serves a quarter of a
warp at a time, whose lanes read the same 16 bytes or ones in other banks (tile/layout.py; rows of
probabilities: `legal_flash_fma.pitch`).

A block's share of p v is summed by itself and then added: rounding errors of a sum grow with its length, and
the sum over all keys would have twice those of matmuls that are added up in blocks. So would one long
sum of a score, hence `chains`.

Both are loops, over 128 bytes of the rows of q and k and over eight columns of keys, unrolled inside.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.score import AccFragment, OnlineSoftmax
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import Places, swizzle_offset

CHUNK = 16        # bytes: four elements
MOST_SHARE = 64   # registers for a block's share of the sums, half as many beside
MOST_BESIDE = 96  # more than so many for the sums


@dataclass
class ScoreMatmul:
    """q kᵀ of a warp: `rows` of them from row `row` (u32) of the tile of q on, `columns` from row `column`
    (u32) of the tile of keys on. q lies at the shared address `q_start`. A score is the sum of `chains`."""
    kb: Kernel
    queries: SharedTile
    keys: SharedTile
    row: Value
    column: Value
    rows: int
    columns: int
    chains: int
    q_start: Value

    def __post_init__(self) -> None:
        kb, lane, zero = self.kb, self.kb.special("laneid"), self.kb.reg("u32", 0)
        self.left = Places(kb, self.queries, swizzle_offset(self.queries, self.row + (lane >> 2), zero))
        self.right = Places(kb, self.keys, swizzle_offset(self.keys, self.column + ((lane & 3) << 1), zero))
        self.chunks = range(0, self.keys.span, CHUNK)
        self.left.prepare([self.queries.plain(0, at) for at in self.chunks])
        self.right.prepare([self.keys.plain(e, at) for at in self.chunks for e in range(2)])

    def of(self, stage: Value) -> AccFragment:
        """The sums of a block whose keys lie at the shared address `stage` (u32)."""
        kb = self.kb
        made: list[AccFragment] = [[[kb.regs("f32", 4, 0.0) for _ in range(self.columns // 8)]
                              for _ in range(self.rows // 16)] for _ in range(self.chains)]
        left, right = kb.reg("u32", self.q_start), kb.reg("u32", stage)
        spans = self.keys.row_bytes // self.keys.span
        if spans == 1: self._span(made, left, right)
        else:
            with kb.loop(0, spans):
                self._span(made, left, right)
                left += self.queries.rows * self.queries.span
                right += self.keys.rows * self.keys.span
        return self._add_chains(made)

    def _add_chains(self, chains: list[AccFragment]) -> AccFragment:
        """The sums of all chains, two by two."""
        while len(chains) > 1:
            half = len(chains) // 2
            for cells, others in zip(chains[:half], chains[half:], strict=True):
                for row, other in zip(cells, others, strict=True):
                    for cell, more in zip(row, other, strict=True):
                        for register, value in zip(cell, more, strict=True): register += value
            chains = chains[:half]
        return chains[0]

    def _span(self, chains: list[AccFragment], left: Value, right: Value) -> None:
        """The share of the elements in one column of the tiles."""
        self.left.at_stage(left)
        self.right.at_stage(right)
        for at in self.chunks:
            rows = [self._read(self.left, self.queries.plain(8 * i, at)) for i in range(self.rows // 8)]
            for j in range(self.columns // 8):
                for e in range(2):
                    four = self._read(self.right, self.keys.plain(8 * j + e, at))
                    for x in range(4):
                        for i, row in enumerate(rows):
                            sum_ = chains[x % self.chains][i // 2][j][2 * (i % 2) + e]
                            self.kb.emit("fma.rn.f32", sum_, row[x], four[x], sum_)

    def _read(self, places: Places, plain: int) -> list[Value]:
        return self.kb.ld("shared", "f32", places(plain), 4)


@dataclass
class Outputs:
    """p v of a warp: probabilities of `rows` rows and `columns` columns lie at the shared address `weights`
    (u32), rows `pitch` bytes apart; values from row `column` (u32) of their tile on, `start` bytes after a
    stage's beginning. `sums`: by rows, by 32 elements, four registers."""
    kb: Kernel
    values: SharedTile
    column: Value
    rows: int
    columns: int
    weights: Value
    pitch: int
    start: int

    def __post_init__(self) -> None:
        kb, lane = self.kb, self.kb.special("laneid")
        self.lane_row = lane >> 3
        self.right = Places(kb, self.values, swizzle_offset(self.values, self.column, (lane & 7) << 4))
        self.groups = self.values.row_bytes // 128
        self.right.prepare([self.values.plain(c, 0) for c in range(8)])
        self.read_from = self.weights + self.lane_row * self.pitch
        self.write_to = self.weights + (lane >> 2) * self.pitch + ((lane & 3) << 3)
        self.sums = [[kb.regs("f32", 4, 0.0) for _ in range(self.groups)] for _ in range(self.rows // 4)]

    def hand_over(self, cells: AccFragment) -> None:
        """Writes a warp's probabilities where its lanes read them."""
        kb = self.kb
        for i, row in enumerate(cells):
            for j, cell in enumerate(row):
                for h in range(2):
                    kb.st("shared", "f32", self.write_to.at((16 * i + 8 * h) * self.pitch + 32 * j),
                         cell[2 * h:2 * h + 2])
        kb.emit("bar.warp.sync", -1)

    def of_rows(self, factors: list[Value]) -> list[Value]:
        """Factors of rows lane / 4 + 8 i as those of rows lane / 8 + 4 i: four lanes have one, the first of
        them 4 · (row % 8)."""
        kb, made = self.kb, self.kb.regs("f32", len(self.sums))
        for i, factor in enumerate(made):
            lane = (self.lane_row << 2) + 16 * (i % 2)
            kb.emit("shfl.sync.idx.b32", factor, factors[i // 2], lane, 31, -1)
        return made

    def scale_rows(self, factors: list[Value]) -> None:
        """Multiplies every row's sums by a factor of rows lane / 4 + 8 i."""
        for row, factor in zip(self.sums, self.of_rows(factors), strict=True):
            for four in row:
                for register in four: register *= factor

    def add(self, stage: Value, rescales: list[Value]) -> None:
        """Adds the share of a block whose stage begins at a shared address (u32) to what sums have become
        when they have shrunk by factors of rows lane / 8 + 4 i."""
        kb, sums = self.kb, self.rows * self.groups
        wide = max(1, (MOST_SHARE if sums <= MOST_BESIDE else MOST_SHARE // 2) // self.rows)
        for first in range(0, self.groups, wide):
            share = [[kb.regs("f32", 4, 0.0) for _ in row[first:first + wide]] for row in self.sums]
            left, right = kb.reg("u32", self.read_from), kb.reg("u32", stage)
            if self.columns == 8: self._eight(share, first, left, right)
            else:
                with kb.loop(0, self.columns // 8):
                    self._eight(share, first, left, right)
                    left += 8 * 4
                    right += 8 * self.values.span
            for row, own, rescale in zip(self.sums, share, rescales, strict=True):
                for four, more in zip(row[first:first + wide], own, strict=True):
                    for register, value in zip(four, more, strict=True):
                        kb.emit("fma.rn.f32", register, register, rescale, value)

    def _eight(self, share: list[list[list[Value]]], first: int, left: Value, right: Value) -> None:
        """Multiplies eight columns of keys, and 32 elements of v for each four registers from `first` on."""
        kb = self.kb
        self.right.at_stage(right)
        for half in range(2):
            weights = [kb.ld("shared", "f32", left.at(4 * i * self.pitch + CHUNK * half), 4)
                       for i in range(self.rows // 4)]
            for c in range(4):
                for j in range(len(share[0])):
                    place = self.right(self.values.plain(4 * half + c, 128 * (first + j)), self.start)
                    four = kb.ld("shared", "f32", place, 4)
                    for row, own in zip(share, weights, strict=True):
                        for register, value in zip(row[j], four, strict=True):
                            kb.emit("fma.rn.f32", register, own[c], value, register)


class ExactSoftmax(OnlineSoftmax):
    """The online softmax of float32 attention: that of `OnlineSoftmax`, without a rounding that 16-bit
    probabilities hide,

        rescale = 2^(factor · (old row_max − row_max))
        p       = 2^(factor · (cell − row_max))     exactly 1 for the largest

    One instruction more for each score than an exponent of one fma, whose rounded product leaves the largest
    a little off 1: a row that sees one column is that column's value, to the bit. Differences of near numbers
    are exact, however large these are. While a row has seen nothing 0 is subtracted in place of its max."""

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
