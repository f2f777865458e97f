"""Choices of tokens, and counts of those that were chosen (spec.py), as programs of the tile language.

    a program has a piece of a row; of each block of it, and of pairs of tokens at once:
        y = x + noise, unless the row has no temperature or all that a thread or a vector has are -inf
        at each place of a block: the largest y so far and the block that it is from, the first of equals
    of these the largest in the order of numbers, of NaN all bits; the lowest index that has it
    the token, or the key of the piece
    where rows are cut in pieces, another launch: the largest key of each row, a program a row

Comparisons are exact, so neither pieces nor blocks matter. The noise is of the multiplications and additions
of Threefry and two logarithms, the first of which is of numbers near 1.

`count` counts chosen tokens in place: it adds one at each row's slot and token, where both are in range.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.language.memory import LARGEST, Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.reference import Argument, dense
from tinygrad_nv.tile.sampling.reference import arguments
from tinygrad_nv.tile.sampling.spec import MOST_FIRST, ChoiceSpec, CountSpec, Number
from tinygrad_nv.tile.sampling.top_k.program import TOP_K
from tinygrad_nv.tile.sampling.top_p.program import TOP_P

DETERMINISM_CLASS = BY_ROW
U32 = dtypes.uint32
ONES, INFINITY = 0xFFFFFFFF, 0x7F800000
PIECE, CPU_PIECE = 1 << 12, 1 << 13     # elements of a piece at least
MANY_PROGRAMS = 512     # four for each SM of an H100: chains of Threefry have latencies to hide
WARPS, WIDTH = 8, 1024  # of a GPU's block: a vector for each thread
BESIDE = 4      # elements of a vector, of which a thread keeps one: registers of more cost half of its speed
DEEP = 4        # blocks without noise that are loaded at once; of others the next is loaded ahead
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA     # of Threefry's key schedule
COUNT_ROWS = {"gpu": 64, "cpu": 4}     # of a program: a thread each, or few


@dataclass(frozen=True)
class PieceSpec:
    """The keys of so many pieces of each row of a choice: uint64 [rows, pieces]."""
    choice: ChoiceSpec
    pieces: int

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The choice's, with keys for results."""
        return Argument("out", dtypes.uint64, (dense(self.choice.rows, self.pieces),), "out"), \
            *arguments(self.choice)[1:]


@dataclass(frozen=True)
class MergeSpec(PieceSpec):
    """A choice by the keys of pieces."""

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Results and keys."""
        keys = Argument("keys", dtypes.uint64, (dense(self.choice.rows, self.pieces),))
        return arguments(self.choice)[0], keys


def choice(out: TensorRef, spec: ChoiceSpec | PieceSpec, blocks: Blocks, **given: TensorRef) -> None:
    """From logits, numbers and places, or from keys of pieces, to tokens or keys."""
    row, of = tile.program_id(0), spec if isinstance(spec, ChoiceSpec) else spec.choice
    if isinstance(spec, MergeSpec): high, low = merge(given["keys"], row)
    else: high, low = choose(of, row, blocks, given)
    if type(spec) is PieceSpec: store_key(out, (row, tile.program_id(1)), high, low)
    elif of.first is not None: store_key(out, (row,), high, low)
    else: out[row] = tile.where(high == ONES, of.size, tile.cast(~low, dtypes.int32))


def store_key(out: TensorRef, place: Sequence[Operand], high: Tile, low: Tile) -> None:
    """Stores both words of a key; of NaN all bits."""
    out[*place, :] = tile.interleave(tile.where(high == ONES, ONES, low).reshape(1), high.reshape(1))


def merge(keys: TensorRef, row: Tile) -> tuple[Tile, Tile]:
    """The words of the largest key of a row."""
    high, low = keys[row, :, 1], keys[row, :, 0]
    most = tile.max(high, 0)
    return most, tile.max(tile.where(high == most, low, 0), 0)


@dataclass(frozen=True)
class Span:
    """A piece of a row: blocks of `width` elements from `start` on. Where the last one would reach beyond the
    row it begins at `last`, earlier, but where that would part pairs of tokens."""
    spec: ChoiceSpec
    logits: TensorRef
    row: Tile
    start: Tile
    length: int
    width: int

    @property
    def last(self) -> int | None:
        """Returns where the last block begins at most."""
        split = self.spec.draw and self.spec.size % 2
        return None if split or self.spec.size < self.width else self.spec.size - self.width

    def load(self, first: Tile, count: int = 1) -> list[tuple[Tile, Tile]]:
        """So many blocks, and where they begin."""
        places = [first + i * self.width for i in range(count)]
        if self.last is not None: places = [tile.minimum(at, self.last) for at in places]
        return [(at, tile.load(self.logits, self.row, Block(at, self.width), other=-inf)) for at in places]


def choose(spec: ChoiceSpec, row: Tile, blocks: Blocks, given: Mapping[str, TensorRef]) -> tuple[Tile, Tile]:
    """The words of the key of a program's piece, but for NaN's lower one."""
    beside, width = blocks.rows, 2 * blocks.rows * blocks.columns
    length = -(-spec.size // (blocks.groups * width)) * width
    start, shape = tile.program_id(1) * length, (width // beside,)
    piece = Span(spec, given["logits"], row, start, length, width)
    best, place = tile.full(shape, -inf), tile.full(shape, start, dtypes.int32)
    most = tile.full(shape, 0, dtypes.int32)    # bits of the largest, NaN's above all others
    seed = read_seed(given["numbers"], given["places"], row) if spec.draw else None
    deep = 1 if spec.draw else min(DEEP, length // width)
    ahead = piece.load(start) if spec.draw else []
    for first in tile.range(start, tile.minimum(start + length, spec.size), width * deep):
        now = ahead if spec.draw else piece.load(first, deep)
        if spec.draw: ahead = piece.load(tile.minimum(first + width, start + length - width))
        for at, x in now:
            y = x if seed is None else add_noise(x, seed, (at >> 1) + (spec.first or 0) // 2)
            y, step, bits = join(y, tile.bitcast(y, dtypes.int32) & 0x7FFFFFFF, beside)
            better, most = y > best, tile.maximum(most, bits)
            best, place = tile.where(better, y, best), tile.where(better, at + step, place)
    key = tile.where(most > INFINITY, ONES, order_bits(best + 0.0))     # -0 is as large as 0
    high = tile.max(key, 0)
    index = tile.min(tile.where(key == high, place + tile.arange(*shape) * beside, spec.size), 0)
    return high, ~tile.cast(index + (spec.first or 0), U32)


def join(y: Tile, bits: Tile, beside: int) -> tuple[Tile, Operand, Tile]:
    """The largest of so many elements side by side, which of them it is, and the largest bits."""
    if beside == 1: return y, 0, bits

    def combine(a: Tile, i: Tile, m: Tile, b: Tile, j: Tile, n: Tile) -> tuple[Tile, Tile, Tile]:
        later = b > a
        return tile.where(later, b, a), tile.where(later, j, i), tile.maximum(m, n)
    y, bits = (each.reshape(each.shape[0] // beside, beside) for each in (y, bits))
    found: tuple[Tile, Tile, Tile] = tile.reduce((y, tile.arange(beside)[None, :], bits), 1, combine)
    return found


def order_bits(x: Tile) -> Tile:
    """Bits of float32 as uint32 in the order of numbers."""
    bits = tile.bitcast(x, dtypes.int32)
    return tile.bitcast(bits ^ (bits >> 31 | -1 << 31), U32)


class Seed(NamedTuple):
    """A row's key of Threefry, its place, and whether there is noise at all."""
    key: tuple[Tile, Tile, Tile]
    place: Tile
    drawn: Tile


def read_seed(numbers: TensorRef, places: TensorRef, row: Tile) -> Seed:
    """Returns what a row's noise is made of."""
    words = [tile.cast(numbers[row, Number.seed + i], U32) for i in range(4)]
    low, high = (words[i] | words[i + 1] << 16 for i in (0, 2))
    return Seed((high, low ^ high ^ PARITY, low), tile.cast(places[row], U32),
                numbers[row, Number.temperature] > 0.0)


def add_noise(x: Tile, seed: Seed, pair: Operand) -> Tile:
    """Logits with noise, of pairs of tokens from one on."""
    count = x.shape[0] // 2

    def compute() -> Tile:
        words = tile.interleave(*threefry(tile.cast(tile.arange(count) + pair, U32), seed))
        uniform = (tile.cast(words >> 9, dtypes.float32) + 0.5) * 2.0 ** -23
        return x - tile.log_normal(-tile.log_near_one(uniform))
    return tile.where_needed(seed.drawn & (x != -inf), compute, x)


def threefry(index: Tile, seed: Seed) -> tuple[Tile, Tile]:
    """Random words of pairs of tokens."""
    a, b = index + seed.key[2], seed.place + seed.key[0]
    for number in range(5):
        for bits in ROTATIONS[number % 2]:
            a = a + b
            b = a ^ tile.rotate_left(b, bits)
        a, b = a + seed.key[number % 3], b + (seed.key[(number + 1) % 3] + (number + 1))
    return a, b


def choice_grid(spec: ChoiceSpec | PieceSpec, blocks: Blocks) -> Grid:
    """A program for each piece of each row."""
    return (spec if isinstance(spec, ChoiceSpec) else spec.choice).rows, blocks.groups, 1


def cut_choice(spec: ChoiceSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Long rows in pieces, until a GPU is full or each thread of a CPU has one."""
    if target.kind == "cpu":
        pieces = min(spec.size // CPU_PIECE, -(-target.threads // spec.rows)) if spec.draw else 1
        return [(Blocks(1, target.isa.lanes, max(1, pieces)), 1)]
    beside, pieces = beside_of(spec), min(-(-spec.size // PIECE), -(-MANY_PROGRAMS // spec.rows))
    return [(Blocks(beside, WIDTH // (2 * beside), pieces), WARPS)]


def beside_of(spec: ChoiceSpec) -> int:
    """Elements side by side of which a GPU's thread keeps one: a vector, but of rows of odd lengths without
    noise, whose elements are loaded one by one."""
    return BESIDE if spec.draw or spec.size % BESIDE == 0 else 1


def steps(spec: ChoiceSpec, blocks: Blocks) -> Sequence[tuple[Any, Blocks]]:
    """One launch, or one of pieces and one that chooses among them."""
    if blocks.groups == 1: return [(spec, blocks)]
    return [(PieceSpec(spec, blocks.groups), blocks), (MergeSpec(spec, blocks.groups), Blocks(1))]


def choice_name(spec: ChoiceSpec | PieceSpec) -> str:
    """The name of a kernel."""
    return "pieces" if isinstance(spec, MergeSpec) else "choice"


# **** counts ****

def count(counts: TensorRef, slots: TensorRef, tokens: TensorRef, spec: CountSpec, blocks: Blocks) -> None:
    """Adds one to the counts of tokens."""
    rows = tile.block(tile.program_id(0) * blocks.rows, blocks.rows)
    slot, token = (tile.load(each, rows, other=-1) for each in (slots, tokens))
    counts[slot, token] = counts[slot, token] + 1.0


def count_grid(spec: CountSpec, blocks: Blocks) -> Grid:
    """A program for each block of rows."""
    return -(-spec.rows // blocks.rows), 1, 1


def cut_count(spec: CountSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """A few rows for each program."""
    rows = COUNT_ROWS[target.kind]
    return [(Blocks(rows), max(1, rows // 32))]


def choice_problems(spec: ChoiceSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    return [f"{spec.size} logits of a row, at most {MOST_FIRST}"] * (spec.size > MOST_FIRST)


def count_problems(spec: CountSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    numel = spec.slots * spec.size
    return [f"{numel} counts, at most {LARGEST}"] if numel > LARGEST else []


PROGRAMS = (TOP_K, TOP_P,
            TileProgram("choice", ChoiceSpec, choice, choice_grid, cut_choice,
                        lambda spec: spec.rows * spec.size * (1 + spec.draw), choice_problems, steps=steps,
                        vector=beside_of, entry=choice_name),
            TileProgram("count", CountSpec, count, count_grid, cut_count, lambda spec: spec.rows,
                        count_problems))
