"""Which probabilities of an attention are dropped: a counter-based generator, the same whatever the tiles.

Protocol. Elements are dropped by Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), a function of a counter
of four words and a key of two that gives four words, 16 bytes. For row r and column c of matrix m (the
batch's three indices as one number), with the seed in memory, two u32, as the key:

    counter    (r, c // 64 · 4 + c % 8 // 2, m, 0)
    byte       c % 64 // 8 · 2 + c % 2, counted from the first word's lowest
    kept       where the byte is below `kept`; what is kept is multiplied by 256 / kept

so that one call gives a lane all that it holds of a row in 64 columns of an accumulator of mma.m16n8 or
wgmma. The mean is exact for the probability that there is, 1 − kept / 256: `kept_of` rounds the asked-for one
to a multiple of 1/256.

`philox` and `keeps` are the reference, of whatever computes with integers of 64 bits: Python's, numpy's
uint64, tinygrad's. `Dropout` is a kernel's:

    dropout = Dropout(k, spec.kept, block_n, matrix, row)   `row` (u32): the lane's first
    dropout.read(seed)                                      after the wait for the kernel before
    dropout.drop(cells, base)                               cells become 0 where they are dropped
    dropout.scale                                           what the others are to be multiplied by
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention import EVERY

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)     # what is added to the key after each round
LOW = 0xFFFFFFFF
SPAN, CHUNK = 64, 16                # columns of a call, of a word of it


def kept_of(dropout_p: float) -> int:
    """Elements of 256 that are kept, of a probability to be dropped."""
    return round(EVERY * (1 - dropout_p))


# **** the reference ****

def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 of words below 2³² in integers of 64 bits."""
    a, b, c, d = counter
    first, second = key
    for number in range(ROUNDS):
        if number: first, second = (first + WEYL[0]) & LOW, (second + WEYL[1]) & LOW
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (right >> 32) ^ b ^ first, right & LOW, (left >> 32) ^ d ^ second, left & LOW
    return a, b, c, d


def keeps(row: Any, column: Any, matrix: Any, seed: Sequence[Any], kept: int) -> Any:
    """Whether elements are kept: arrays that broadcast, of unsigned integers of 64 bits."""
    words = philox((row, column // SPAN * 4 + column % 8 // 2, matrix, row * 0), seed)
    place, byte = column % SPAN // 8 * 2 + column % 2, row * 0
    for i in range(16): byte = byte + (place == i) * (words[i // 4] >> 8 * (i % 4) & 0xFF)
    return byte < kept


# **** in a kernel ****

@dataclass
class Dropout:
    """Drops elements of a lane: of each 16 rows from `row` on, row and row + 8."""
    k: Kernel
    kept: int
    block_n: int
    matrix: Value
    row: Value

    @property
    def scale(self) -> float:
        """What the kept elements are multiplied by."""
        return EVERY / self.kept

    def read(self, seed: Value) -> None:
        """Reads the seed, where the pointer points."""
        self.key = self.k.regs("u32", 2)
        self.k.emit("ld.global.v2.u32", self.key, seed.at())
        self.quad = (self.k.special("laneid") & 3).to("u32")

    def drop(self, cells: Sequence[Sequence[Sequence[Value]]], base: Value) -> None:
        """Elements of a block of columns that begins at `base` (s32), a multiple of `block_n`."""
        chunk = (base >> 4).to("u32")
        for i, row in enumerate(cells):
            halves = self._halves(16 * i, chunk, len(row) // 2)
            for h, words in enumerate(halves):
                for j, cell in enumerate(row):
                    for e in range(2): self._drop(cell[2 * h + e], words[j // 2], j % 2 * 2 + e)

    def _drop(self, register: Value, word: Value, byte: int) -> None:
        """An element, by a byte of a word: what is above it decides no more than equality."""
        shifted = word if byte == 3 else word << (24 - 8 * byte)
        self.k.emit("selp.f32", register, register, 0.0, shifted < (self.kept << 24))

    def _halves(self, down: int, chunk: Value, chunks: int) -> list[list[Value]]:
        """Words of rows `down` and `down` + 8, one for each of `chunks` 16 columns from number `chunk` on."""
        loose = min(4, self.block_n // CHUNK & -(self.block_n // CHUNK))  # blocks begin at multiples of it
        calls = -(-(4 - loose + chunks) // 4)
        group = chunk >> 2
        made: list[list[Value]] = [[], []]
        for call in range(calls):
            at = ((group + call) << 2) + self.quad
            rows = [[self.row + (down + 8 * h), at, self.matrix, None] for h in range(2)]
            for h, words in enumerate(self._philox(rows)): made[h] += words
        for step in (2, 1):
            if step < loose: continue
            on = (chunk & step) != 0
            made = [[self.k.select(on, words[min(i + step, len(words) - 1)], word, "u32")
                     for i, word in enumerate(words)] for words in made]
        return [words[:chunks] for words in made]

    def _philox(self, counters: list[list[Value | None]]) -> list[list[Value]]:
        """Philox of several counters at once, None for 0: they share the round's keys."""
        first, second = self.key
        for number in range(ROUNDS):
            if number: first, second = first + WEYL[0], second + WEYL[1]
            for i, (a, b, c, d) in enumerate(counters):
                assert a is not None
                assert c is not None
                (low, high), (under, over) = self._wide(a, 0), self._wide(c, 1)
                counters[i] = [self._mixed(over, b, first), under, self._mixed(high, d, second), low]
        return [[word for word in counter if word is not None] for counter in counters]

    def _wide(self, value: Value, which: int) -> tuple[Value, Value]:
        """Both halves of a product with a multiplier."""
        k, product = self.k, self.k.reg("u64")
        low, high = k.regs("u32", 2)
        k.emit("mul.wide.u32", product, value, MULTIPLIERS[which])
        k.emit("mov.b64", [low, high], product)
        return low, high

    def _mixed(self, a: Value, b: Value | None, c: Value) -> Value:
        if b is None: return a ^ c
        made = self.k.reg("u32")
        self.k.emit("lop3.b32", made, a, b, c, 0x96)  # a ^ b ^ c
        return made
