"""Rows of a table by number (spec.py), and on CPUs its gradient, as programs of the tile language.

    a program of rows has some tokens, and a slice of columns; of `lanes` tokens at a time:
        read the tokens, count from the end what is below 0
        load the columns of their rows, 0 of no row; store
    a program of the gradient has columns, and its own part of two lists:
        from the last token to the first: following[t] = head[row], head[row] = t, where there is such a row
        for each row: add up the tokens of its chain, one after the other, in float32; store

What a row holds does not matter: it is moved in words of four bytes, where rows allow. Programs of a gradient
all go through all tokens, which makes their work the same whatever the tokens are.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec
from tinygrad_nv.tile.language.memory import LARGEST, Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.programs import PART_ELEMENTS, Blocks, Grid, TileProgram

DETERMINISM_CLASS = OVER_ROWS
WORDS = {4: dtypes.uint32, 2: dtypes.uint16, 1: dtypes.uint8}   # by bytes
VECTOR_BYTES = 16
CTA = 256               # threads, less where there are fewer vectors
FEW, FEW_CTA = 264 * CTA, 128   # vectors of all tokens that are spread as thinly as that: two CTAs an SM
DEEP = 4                # vectors of a thread
CPU_ROWS = 16
VECTORS = 8             # of a CPU, whose sums stay in registers
LINE = 32               # columns: no line of a cache is written by two
NO_ROW = -LARGEST - 1   # plus any number of rows still below 0
MOST = LARGEST - CTA    # rows and tokens, so that the end of the last block is an int32


def embedding(out: TensorRef, weight: TensorRef, tokens: TensorRef, spec: EmbeddingSpec,
              blocks: Blocks) -> None:
    """From tokens [*extents] and weight [V, H] to out [T, H]."""
    first = tile.program_id(0) * blocks.rows
    columns = tile.block(tile.program_id(1) * blocks.columns, blocks.columns)
    if blocks.lanes == 1:
        for token in tile.range(first, first + blocks.rows) if blocks.rows > 1 else [first]:
            copy_row(out, token, weight, find_rows(tokens, token, spec), columns)
    else:
        rows = tile.block(first, blocks.rows)
        out[rows, columns] = weight[find_rows(tokens, rows, spec), columns]


def copy_row(out: TensorRef, token: Operand, weight: TensorRef, row: Tile, columns: Block) -> None:
    """Stores columns of a row of the table, or zeros."""
    if (row >= 0) & (row < weight.shape[0]):
        out[token, columns] = weight[tile.clamp(row, 0, weight.shape[0] - 1), columns]
    else: out[token, columns] = tile.zeros((columns.size,), out.dtype)


def add_up(out: TensorRef, head: TensorRef, following: TensorRef, tokens: TensorRef, grad: TensorRef,
           spec: EmbeddingGradientSpec, blocks: Blocks) -> None:
    """From tokens [*extents] and grad [T, H] to out [V, H], `blocks.rows` columns at a time."""
    part, count = tile.program_id(0), spec.tokens.count
    first = part * blocks.columns
    stop = tile.minimum(first + blocks.columns, spec.width)
    for v in tile.range(0, spec.rows, blocks.rows): head[part, tile.block(v, blocks.rows)] = -1
    for i in tile.range(count):
        token = count - 1 - i
        row = find_rows(tokens, token, spec)
        if (row >= 0) & (row < spec.rows):
            following[part, token] = head[part, row]
            head[part, row] = token
    for v in tile.range(spec.rows):
        for n in tile.range(first, stop, blocks.rows):
            columns, token, total = tile.block(n, blocks.rows), head[part, v], tile.zeros((blocks.rows,))
            while (token >= 0) & (token < count):
                total += tile.cast(grad[token, columns], dtypes.float32)
                token = following[part, token]
            out[v, columns] = tile.cast(total, out.dtype)


def find_rows(tokens: TensorRef, token: Operand | Block, spec: EmbeddingSpec) -> Tile:
    """The row that each token means; below 0 or beyond the last one, where it means none."""
    place: list[Any] = [token]
    rest: Any = token.indices if isinstance(token, Block) else token
    for extent in reversed(spec.tokens.extents[1:]):
        place[:1] = [rest // extent, rest % extent]
        rest = place[0]
    last = [0] * (tokens.ndim - len(place))
    number = tile.bitcast(tokens[*place, *last], dtypes.int32)
    if spec.tokens.dtype == dtypes.int64:
        high = tile.bitcast(tokens[*place, 1], dtypes.int32)
        number = tile.where(high == number >> 31, number, NO_ROW)
    return tile.where(number < 0, number + spec.rows, number)


# **** schedules ****

def as_words(spec: EmbeddingSpec) -> EmbeddingSpec:
    """A table of the same rows, in words of as many bytes as rows are multiples of."""
    nbytes = next(nbytes for nbytes in WORDS if spec.row_bytes % nbytes == 0)
    return replace(spec, width=spec.row_bytes // nbytes, dtype=WORDS[nbytes])


def grid(spec: EmbeddingSpec, blocks: Blocks) -> Grid:
    """A program for each block of tokens and of columns."""
    return -(-spec.tokens.count // blocks.rows), -(-as_words(spec).width // blocks.columns), 1


def cut(spec: EmbeddingSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """A CPU's programs have some tokens, whole rows; of a GPU's each thread has some vectors of a row."""
    words = as_words(spec)
    if target.kind == "cpu":
        parts = max(1, min(target.threads, spec.tokens.count * spec.width // PART_ELEMENTS))
        return [(Blocks(max(1, min(CPU_ROWS, spec.tokens.count // parts)), words.width), 1)]
    vector = math.gcd(VECTOR_BYTES // words.dtype.itemsize, words.width)
    pieces = words.width // vector
    few = spec.tokens.count * pieces <= FEW
    cta = FEW_CTA if few else CTA
    team = min(cta, power(pieces))
    deep = 1 if few else min(DEEP, -(-pieces // team))
    rows = max(32 // team, min(cta // team, power(spec.tokens.count)))
    if words.rows * words.width > LARGEST: rows = 1
    return [(Blocks(rows, team * deep * vector, 1, rows), max(1, team * rows // 32))]


def gradient_cut(spec: EmbeddingGradientSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Columns for each thread, where the table is worth waking it."""
    together = VECTORS * target.isa.lanes
    if (even := math.gcd(together, spec.width)) >= LINE: together = even
    shares = -(-spec.width // together)
    programs = max(1, min(target.threads, shares, spec.rows * spec.width // PART_ELEMENTS))
    return [(Blocks(together, -(-shares // programs) * together), 1)]


def lists(spec: EmbeddingGradientSpec, blocks: Blocks) -> dict[str, tuple[int, int]]:
    """The lists of all programs of a gradient."""
    programs, _, _ = column_grid(spec, blocks)
    return {"head": (programs, spec.rows), "following": (programs, spec.tokens.count)}


def column_grid(spec: EmbeddingGradientSpec, blocks: Blocks) -> Grid:
    """A program for each block of columns."""
    return -(-spec.width // blocks.columns), 1, 1


def power(count: int) -> int:
    """The least power of two not below a number."""
    return 1 << (count - 1).bit_length()


def gradient_problems(spec: EmbeddingGradientSpec, kind: str) -> list[str]:
    """Why no gradient can be; empty when one can."""
    return ["a symbolic number of tokens"] * spec.symbolic + problems(spec, kind)


def problems(spec: EmbeddingSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    return [f"{count} {name}, at most {MOST}" for name, count in
            (("rows", spec.rows), ("tokens", spec.tokens.count)) if count > MOST]


PROGRAMS = (TileProgram("embedding", EmbeddingSpec, embedding, grid, cut,
                        lambda spec: spec.tokens.count * spec.width, problems, fixed=True,
                        steps=lambda spec, blocks: [(as_words(spec), blocks)],
                        by_rows=("out", "tokens")),
            TileProgram("embedding_gradient", EmbeddingGradientSpec, add_up, column_grid, gradient_cut,
                        lambda spec: spec.rows * spec.width, gradient_problems, fixed=True,
                        scratch=lists, kinds=("cpu",)))
