"""Dropout of an attention's probabilities: a counter-based generator, the same whatever the tiles.

Protocol. Elements are dropped by Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), a function of a counter
of four words and a key of two that gives four words, 16 bytes. For row r and column c of matrix m (the
batch's three indices as one number), with the seed in memory, two u32, as the key:

    counter    (r, c // 64 · 4 + c % 8 // 2, m, 0)
    byte       c % 64 // 8 · 2 + c % 2, counted from the first word's lowest
    kept       where the byte is below `kept`; what is kept is multiplied by 256 / kept

so that one call gives a lane all that it holds of a row in 64 columns of an accumulator of mma.m16n8 or
wgmma. The mean is exact for the probability that there is, 1 − kept / 256: `keep_256ths` rounds the asked-for
one to a multiple of 1/256.

`philox` and `keeps` are the reference, of whatever computes with integers of 64 bits: Python's, numpy's
uint64, tinygrad's. `Dropout` is a kernel's:

    dropout = Dropout(k, spec.kept, block_n, spec.batch)
    dropout.read(seed)                                      after the wait for the kernel before
    dropout.move(batch, row)                                `row` (u32): the lane's first; for every tile
    dropout.drop(cells, base)                               cells become 0 where they are dropped
    dropout.scale                                           what the others are to be multiplied by

A backward pass has transposed fragments: keys down, rows across. There a call has two elements of a lane, and
two of the lane whose key is the other of a pair: each makes the calls of every other row, and they exchange
words. `TransposedDropout` marks elements instead, since they are needed twice:

    dropout = TransposedDropout(k, spec.kept, first)        `first` (u32): the warp's first key
    dropout.read(seed)
    dropout.mark(cells, base, matrix)                       p of what is dropped becomes −p

`of_values` of a marked p, max(p, 0), is what dv is made of, which is to be multiplied by `scale` at its end;
`change` makes ds, |p| (dp · (p is negative ? 0 : scale) − delta).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinygrad_nv.tile.attention.spec import KEEP_ALL

if TYPE_CHECKING:  # no kernel for a CPU needs it
    from tinygrad_nv.ptx.builder import Kernel, Value
    Counter = list[Value | None]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)     # what is added to the key after each round
LOW = 0xFFFFFFFF
SPAN, CHUNK = 64, 16                # columns of a call, of a word of it


def keep_256ths(dropout_p: float) -> int:
    """Elements of 256 that are kept, of a probability to be dropped."""
    return round(KEEP_ALL * (1 - dropout_p))


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
class Generator:
    """Philox in a kernel."""
    kb: Kernel
    kept: int

    @property
    def scale(self) -> float:
        """Factor of the elements that are kept."""
        return KEEP_ALL / self.kept

    def read(self, seed: Value) -> None:
        """Reads the seed, where the pointer points."""
        self.key = self.kb.regs("u32", 2)
        self.kb.emit("ld.global.v2.u32", self.key, seed.at())

    def keeps(self, word: Value) -> Value:
        """Whether the highest byte of a word keeps its element: what is below it decides no more than what
        equals the bound."""
        return word < (self.kept << 24)

    def words(self, counters: list[Counter]) -> list[list[Value]]:
        """Philox of several counters at once, None for 0: they share the round's keys."""
        first, second = self.key
        for number in range(ROUNDS):
            if number: first, second = first + WEYL[0], second + WEYL[1]
            for i, (a, b, c, d) in enumerate(counters):
                assert a is not None
                assert c is not None
                (low, high), (under, over) = self._wide(a, 0), self._wide(c, 1)
                counters[i] = [self._mix(over, b, first), under, self._mix(high, d, second), low]
        return [[word for word in counter if word is not None] for counter in counters]

    def _wide(self, value: Value, which: int) -> tuple[Value, Value]:
        """Both halves of a product with a multiplier."""
        kb, product = self.kb, self.kb.reg("u64")
        low, high = kb.regs("u32", 2)
        kb.emit("mul.wide.u32", product, value, MULTIPLIERS[which])
        kb.emit("mov.b64", [low, high], product)
        return low, high

    def _mix(self, a: Value, b: Value | None, c: Value) -> Value:
        if b is None: return a ^ c
        made = self.kb.reg("u32")
        self.kb.emit("lop3.b32", made, a, b, c, 0x96)  # a ^ b ^ c
        return made


@dataclass
class Dropout(Generator):
    """Drops elements of a lane: of each 16 rows, its first and that + 8. `batch` is the spec's."""
    block_n: int
    batch: tuple[int, int, int]

    def move(self, at: Sequence[Value], row: Value) -> None:
        """Drops the rows from the lane's first on of a matrix, by its indices."""
        self.row = row
        self.matrix = (at[0] * self.batch[1] + at[1]) * self.batch[2] + at[2]

    def drop(self, cells: Sequence[Sequence[Sequence[Value]]], base: Value) -> None:
        """Elements of a block of columns that begins at `base` (s32), a multiple of `block_n`."""
        chunk = (base >> 4).to("u32")
        for i, row in enumerate(cells):
            halves = self._halves(16 * i, chunk, len(row) // 2)
            for h, words in enumerate(halves):
                for j, cell in enumerate(row):
                    for e in range(2): self._drop(cell[2 * h + e], words[j // 2], j % 2 * 2 + e)

    def _drop(self, register: Value, word: Value, byte: int) -> None:
        """An element, by a byte of a word."""
        shifted = word if byte == 3 else word << (24 - 8 * byte)
        self.kb.emit("selp.f32", register, register, 0.0, self.keeps(shifted))

    def _halves(self, down: int, chunk: Value, chunks: int) -> list[list[Value]]:
        """Words of rows `down` and `down` + 8, one for each of `chunks` 16 columns from number `chunk` on."""
        loose = min(4, self.block_n // CHUNK & -(self.block_n // CHUNK))  # blocks begin at multiples of it
        calls = -(-(4 - loose + chunks) // 4)
        group = chunk >> 2
        made: list[list[Value]] = [[], []]
        for call in range(calls):
            at = ((group + call) << 2) + (self.kb.special("laneid") & 3)
            rows: list[Counter] = [[self.row + (down + 8 * h), at, self.matrix, None] for h in range(2)]
            for h, words in enumerate(self.words(rows)): made[h] += words
        for step in (2, 1):
            if step < loose: continue
            on = (chunk & step) != 0
            made = [[self.kb.select(on, words[min(i + step, len(words) - 1)], word, "u32")
                     for i, word in enumerate(words)] for words in made]
        return [words[:chunks] for words in made]


@dataclass
class TransposedDropout(Generator):
    """Marks elements of a warp's keys, 16, 32 or 64 of them, from `first` on, a multiple of as many."""
    first: Value

    def mark(self, cells: Sequence[Sequence[Sequence[Value]]], base: Value, matrix: Value) -> None:
        """Elements, by 16 keys and by 8 rows from `base` (s32) on, that are at least 0."""
        kb, lane = self.kb, self.kb.special("laneid")
        odd = lane >> 2 & 1  # which key of a pair is the lane's; and of which row of a pair it makes calls
        mine, raised = odd != 0, (odd ^ 1) << 3
        row = base.to("u32") + ((lane & 3) << 1) + odd
        at = (self.first >> 6 << 2) + (lane >> 3)
        for j in range(len(cells[0])):
            words = self.words([[row + 8 * j, at, matrix, None]])[0]
            for i, part in enumerate(cells):
                own = self._own(words, i, len(cells))
                other = kb.reg("b32")
                kb.emit("shfl.sync.bfly.b32", other, own, 4, 31, -1)
                for e, (yes, no) in enumerate(((other, own), (own, other))):
                    word = kb.select(mine, yes, no, "u32") << raised
                    for h, each in enumerate((word << 16, word)):
                        register = part[j][2 * h + e]
                        kb.emit("selp.f32", register, register, -register, self.keeps(each))

    def change(self, dp: Value, p: Value, minus: Value, scale: float = 1.0) -> None:
        """dp becomes ds of a marked p: `minus` is −delta, both times `scale`, which dp is not yet."""
        kb = self.kb
        kb.emit("fma.rn.f32", dp, dp, kb.select(p < 0.0, 0.0, scale * self.scale, "f32"), minus)
        kb.emit("abs.f32", size := kb.reg("f32"), p)
        dp.set(dp * size)

    def of_values(self, p: Value) -> Value:
        """Returns the operand of dv for a marked p."""
        made = self.kb.reg("f32")
        self.kb.emit("max.f32", made, p, 0.0)
        return made

    def _own(self, words: list[Value], i: int, count: int) -> Value:
        """The word of 16 keys, number `i` of the warp's `count`."""
        kb, chunk = self.kb, self.first >> 4
        if count == 4: return words[i]
        upper = (chunk & 2) != 0
        if count == 2: return kb.select(upper, words[2 + i], words[i], "u32")
        odd = (chunk & 1) != 0
        high, low = (kb.select(odd, words[n + 1], words[n], "u32") for n in (2, 0))
        return kb.select(upper, high, low, "u32")
