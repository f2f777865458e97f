"""The main loop of a `gemv` kernel's lanes: four ways to multiply, by where the chunks lie and which lane
multiplies them.

Protocol: `point(address)` says where the activations of the warp's iteration lie in shared memory. Then
`take(step)` multiplies all chunks of one step, each of which it gives back (`again`) as soon as its registers
are free. `results()` are the sums, with the row of activations and the column of the warp they belong to,
from this lane's `corner` on.

mma.sync takes weights as its 16 × K operand and activations as the K × 8 one. Which K an operand's slots
mean is free, as long as both say the same: a lane's 16 bytes of two rows are the fragments of two
instructions for m16n8k16, whose slots 2q, 2q + 1, 2q + 8, 2q + 9 are the lane's elements 4j to 4j + 3.
"""
from __future__ import annotations

from collections.abc import Callable

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.gemv import operands as w
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.spec import FP8, INT8S

Slot = tuple[int, int, int, int]  # step, part, chunk along n, row of K
# sum, part, row and column from the lane's corner on, which lanes have it
Sums = list[tuple[Value, int, int, int, Value | None]]


class GemvLanes:
    """A lane's place, its sums, and how it reads activations. `words_of(slot)` gives a chunk's words,
    `again(slot)` loads the next one in its place."""

    def __init__(self, kb: Kernel, plan: GemvPlan, words_of: Callable[[Slot], list[Value]],
                 again: Callable[[Slot], None]) -> None:
        self.kb, self.plan, self.words_of, self.again = kb, plan, words_of, again
        self.m, self.parts, self.dtype = plan.spec.m, plan.spec.parts, plan.spec.b.dtype
        self.total = "s32" if self.dtype in INT8S else "f32"
        lane = kb.special("laneid")
        self.lane_k, self.lane_n = lane % plan.lanes_k, lane // plan.lanes_k
        # where this lane's activations begin; mma.sync: for each 8 rows of them
        self.x_offsets = [self.lane_k * plan.x_width]
        self.xs: list[Value] = []
        self.begin()

    def begin(self) -> None:
        """Makes the sums."""
        raise NotImplementedError

    def point(self, address: Value) -> None:
        """Activations of the iteration begin at this shared address."""
        if not self.xs: self.xs = self.kb.regs("u32", len(self.x_offsets))
        for x, offset in zip(self.xs, self.x_offsets, strict=True):
            self.kb.emit("add.u32", x, address, offset)

    def advance(self, nbytes: int) -> None:
        """They begin so much further."""
        for x in self.xs: x += nbytes

    def zeros(self, count: int) -> list[Value]:
        return self.kb.regs(self.total, count, 0 if self.total == "s32" else 0.0)

    def activations(self, x: Value, row: int, step: int) -> list[Value]:
        """The words that belong to a step's chunks, `row` rows after the address `x`."""
        plan = self.plan
        width, nbytes = plan.x_width, plan.x_chunk
        into = w.registers(self.kb, nbytes, width)
        start = row * plan.pitch_bytes + step * plan.step * plan.itemsize
        for piece in range(nbytes // width):
            w.load(self.kb, "ld.shared", into, piece, width, x.at(start + piece * plan.lanes_k * width))
        return w.spread(self.kb, w.words(self.kb, into, width), plan.spec.a.dtype)

    def weights(self, slot: Slot) -> list[Value]:
        """A chunk's words, fp8 as float16."""
        return w.spread(self.kb, self.words_of(slot), self.dtype)

    def column(self, element: int) -> int:
        """The column of an element of a chunk that lies along n, from the lane's first."""
        plan = self.plan
        return element // plan.piece * plan.lanes_n * plan.piece + element % plan.piece

    def corner(self) -> tuple[Value | int, Value]:
        """The lane's first row of activations, and its first column of the warp."""
        return 0, self.lane_n * (1 if self.plan.along == "k" else self.plan.piece)

    def multiply_add(self, total: Value, a: Value, b: Value) -> None:
        self.kb.emit("mad.lo.s32" if self.total == "s32" else "fma.rn.f32", total, a, b, total)

    def take(self, step: int) -> None:
        """Multiplies the chunks of a step."""
        raise NotImplementedError

    def results(self) -> Sums:
        """All sums of the warp."""
        raise NotImplementedError

    def from_lane(self, value: Value, distance: int) -> Value:
        """The value of another lane along K."""
        made = self.kb.reg(value.kind)
        self.kb.emit("shfl.sync.bfly.b32", made, value, distance, 31, -1)
        return made

    def over_lanes(self, total: Value, distance: int) -> Value:
        """The sum over lanes along K that are up to `distance` apart, in each of them."""
        while distance:
            total, distance = total + self.from_lane(total, distance), distance // 2
        return total


class RowsByLanes(GemvLanes):
    """CUDA cores, chunks along K: each lane has its part of K of each row; shuffles add the parts. Bytes are
    multiplied four at a time by dp4a."""

    def begin(self) -> None:
        self.sums = [[self.zeros(self.m) for _ in range(self.plan.rows)] for _ in range(self.parts)]

    def take(self, step: int) -> None:
        few = self.plan.few == self.m
        x = [self.numbers(self.activations(self.xs[0], i, step)) for i in range(self.m)] if few else []
        slots = [(step, p, r, 0) for p in range(self.parts) for r in range(self.plan.rows)]
        if few:  # activations in registers, one chunk after the other
            for slot in slots:
                weights = self.numbers(self.words_of(slot))
                for i in range(self.m): self.dot(self.sums[slot[1]][slot[2]], i, weights, x[i])
                self.again(slot)
            return
        every = [self.numbers(self.words_of(slot)) for slot in slots]
        for i in range(self.m):
            row = self.numbers(self.activations(self.xs[0], i, step))
            for slot, weights in zip(slots, every, strict=True):
                self.dot(self.sums[slot[1]][slot[2]], i, weights, row)
        for slot in slots: self.again(slot)

    def numbers(self, some: list[Value]) -> list[Value]:
        """A chunk's, of bytes by fours."""
        return some if self.total == "s32" else w.numbers(self.kb, some, self.dtype)

    def dot(self, sums: list[Value], i: int, weights: list[Value], x: list[Value]) -> None:
        signs = ["s32" if operand.dtype == dtypes.int8 else "u32"
                 for operand in (self.plan.spec.b, self.plan.spec.a)]
        for one, other in zip(weights, x, strict=True):
            if self.total == "s32": self.kb.emit(f"dp4a.{'.'.join(signs)}", sums[i], one, other, sums[i])
            else: self.multiply_add(sums[i], one, other)

    def results(self) -> Sums:
        """Lanes are added two by two, from the furthest. While a lane has several rows, each of two keeps
        half of them: 18 instructions for 4 rows over 32 lanes instead of 40."""
        plan = self.plan
        made: Sums = []
        left = plan.lanes_k >> len(self.halves)  # lanes that have the same rows still
        mine = (self.lane_k & left - 1) == 0
        bits = [(self.lane_k & distance) != 0 for distance, _ in self.halves]
        for p in range(self.parts):
            for i in range(self.m):
                values = [row[i] for row in self.sums[p]]
                for bit, (distance, half) in zip(bits, self.halves, strict=True):
                    values = [self.exchange_sums(low, high, bit, distance)
                              for low, high in zip(values[:half], values[half:], strict=True)]
                made += [(self.over_lanes(value, left // 2), p, i, r * plan.lanes_n, mine)
                         for r, value in enumerate(values)]
        return made

    @property
    def halves(self) -> list[tuple[int, int]]:
        """Distances between lanes of which each keeps so many of twice as many rows."""
        made, rows, distance = [], self.plan.rows, self.plan.lanes_k // 2
        while rows % 2 == 0 and distance:
            rows //= 2
            made.append((distance, rows))
            distance //= 2
        return made

    def corner(self) -> tuple[Value | int, Value]:
        column = self.lane_n
        for distance, half in self.halves:
            first = self.kb.select((self.lane_k & distance) != 0, half * self.plan.lanes_n, 0, "u32")
            column = column + first
        return 0, column

    def exchange_sums(self, low: Value, high: Value, bit: Value, distance: int) -> Value:
        """Returns, of two sums, the one this lane keeps, with what the other lane had of it."""
        kb = self.kb
        keep, give = kb.select(bit, high, low, self.total), kb.select(bit, low, high, self.total)
        return keep + self.from_lane(give, distance)


class ColumnsByLanes(GemvLanes):
    """CUDA cores, chunks along n: each lane has its columns and some rows of K, whose activations are the
    same for all columns."""

    def begin(self) -> None:
        self.sums = [[[self.zeros(self.plan.vector) for _ in range(self.m)] for _ in range(self.plan.rows)]
                     for _ in range(self.parts)]

    def take(self, step: int) -> None:
        x = [self.activations(self.xs[0], i, step) for i in range(self.m)]
        for at in range(self.plan.depth):
            now = [self.number(some, at) for some in x]
            for p in range(self.parts):
                for r in range(self.plan.rows):
                    weights = w.numbers(self.kb, self.words_of((step, p, r, at)), self.dtype)
                    for i, each in enumerate(now):
                        for total, weight in zip(self.sums[p][r][i], weights, strict=True):
                            self.multiply_add(total, weight, each)
                    self.again((step, p, r, at))

    def number(self, some: list[Value], at: int) -> Value:
        """One activation of a lane's."""
        kind = self.plan.spec.a.dtype
        a_word = 4 // kind.itemsize
        return w.numbers(self.kb, [some[at // a_word]], kind)[at % a_word]

    def results(self) -> Sums:
        mine, plan = self.lane_k == 0, self.plan
        return [(self.over_lanes(total, plan.lanes_k // 2), p, i, self.column(e) + r * plan.granule, mine)
                for p in range(self.parts) for r in range(plan.rows) for i in range(self.m)
                for e, total in enumerate(self.sums[p][r][i])]


class TensorCoreLanes(GemvLanes):
    """mma.sync: sums of 16 rows of weights × 8 of activations."""

    def begin(self) -> None:
        plan = self.plan
        self.pairs = plan.rows // 2 if plan.along == "k" else plan.rows * plan.vector // 2
        self.sums = [[[self.zeros(4) for _ in range(plan.tiles_m)] for _ in range(self.pairs)]
                     for _ in range(self.parts)]
        # lanes beyond the last row of activations read it again: their sums are not stored
        rows = [at_most(self.kb, self.lane_n, self.m - 1 - 8 * tile) for tile in range(plan.tiles_m)]
        self.x_offsets = [row * plan.pitch_bytes + self.x_offsets[0] for row in rows]

    def fragments(self, step: int) -> list[list[Value]]:
        """Activations of a step, for each 8 rows of them."""
        return [self.activations(x, 8 * tile, step) for tile, x in enumerate(self.xs)]

    def multiply(self, p: int, pair: int, low: list[Value], high: list[Value],
                 fragments: list[list[Value]]) -> None:
        """Adds products of 16 columns of weights: the words of column lane / 4, and of 8 columns further."""
        names = {dtypes.int8: "s8", dtypes.uint8: "u8", dtypes.bfloat16: "bf16", dtypes.float16: "f16"}
        left, right = (names[dtypes.float16 if operand.dtype in FP8 else operand.dtype]
                       for operand in (self.plan.spec.b, self.plan.spec.a))
        shape = "m16n8k32" if self.total == "s32" else "m16n8k16"
        for at in range(0, len(low), 2):
            a = [low[at], high[at], low[at + 1], high[at + 1]]
            for tile, b in enumerate(fragments):
                c = self.sums[p][pair][tile]
                self.kb.mma(shape, f"{self.total}.{left}.{right}.{self.total}", c, a, b[at:at + 2], c)

    def results(self) -> Sums:
        made: Sums = []
        for tile in range(self.plan.tiles_m):
            inside = [self.lane_k * 2 + (8 * tile + odd) < self.m if 8 * tile + 8 > self.m else None
                      for odd in range(2)]
            for p in range(self.parts):
                for pair in range(self.pairs):
                    made += [(total, p, 8 * tile + (i & 1), self.slot(pair, i >> 1), inside[i & 1])
                             for i, total in enumerate(self.sums[p][pair][tile])]
        return made

    def corner(self) -> tuple[Value | int, Value]: return self.lane_k * 2, super().corner()[1]

    def slot(self, pair: int, high: int) -> int:
        """The column that row lane / 4 + 8 `high` of an operand is, from the lane's corner."""
        raise NotImplementedError


class TensorRows(TensorCoreLanes):
    """Chunks along K: fragments as they are loaded."""

    def take(self, step: int) -> None:
        fragments = self.fragments(step)
        for p in range(self.parts):
            for pair in range(self.pairs):
                slots = [(step, p, 2 * pair + half, 0) for half in range(2)]
                low, high = (self.weights(slot) for slot in slots)
                self.multiply(p, pair, low, high, fragments)
                for slot in slots: self.again(slot)

    def slot(self, pair: int, high: int) -> int: return 16 * pair + 8 * high


class TensorColumns(TensorCoreLanes):
    """Chunks along n: 8 rows of K a lane, transposed by prmt so that a word has one column."""

    def take(self, step: int) -> None:
        fragments = self.fragments(step)
        for p in range(self.parts):
            for r in range(self.plan.rows):
                slots = [(step, p, r, at) for at in range(8)]
                rows = [self.words_of(slot) for slot in slots]
                for word in range(len(rows[0])):
                    columns = self.transpose_words([row[word] for row in rows])
                    for number in range(0, len(columns), 2):
                        pair = (r * self.plan.vector + word * len(columns) + number) // 2
                        low, high = columns[number:number + 2]
                        self.multiply(p, pair, low, high, fragments)
                for slot in slots: self.again(slot)

    def transpose_words(self, rows: list[Value]) -> list[list[Value]]:
        """Each column of a word of 8 rows: 16-bit numbers by pairs, one prmt each; bytes by fours, two."""
        def pair_words(words: list[Value], selector: int) -> list[Value]:
            return [w.permute(self.kb, words[at], words[at + 1], selector) for at in range(0, len(words), 2)]

        columns = [rows] if self.plan.itemsize == 2 else [pair_words(rows, 0x5140), pair_words(rows, 0x7362)]
        return [w.spread(self.kb, pair_words(words, both), self.dtype)
                for words in columns for both in (0x5410, 0x7632)]

    def slot(self, pair: int, high: int) -> int:
        chunk, element = divmod(2 * pair + high, self.plan.vector)
        return self.column(element) + chunk * self.plan.granule


def at_most(kb: Kernel, value: Value, most: int) -> Value:
    """The smaller of a lane's u32, which is below 8, and a number."""
    if most >= 7: return value
    made = kb.reg("u32")
    kb.emit("min.u32", made, value, most)
    return made


def lanes_of(plan: GemvPlan) -> type[GemvLanes]:
    """How a plan multiplies."""
    if plan.tensor: return TensorRows if plan.along == "k" else TensorColumns
    return RowsByLanes if plan.along == "k" else ColumnsByLanes
