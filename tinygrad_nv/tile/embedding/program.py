"""Rows of a table by number (spec.py) as a program of the tile language.

    a program has some tokens, and a slice of columns; of `lanes` tokens at a time:
        read the tokens, count from the end what is below 0
        load the columns of their rows, 0 of no row; store

What a row holds does not matter: it is moved in words of four bytes, where rows allow.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec
from tinygrad_nv.tile.language.memory import LARGEST, Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = OVER_ROWS
WORDS = {4: dtypes.uint32, 2: dtypes.uint16, 1: dtypes.uint8}   # by bytes
VECTOR_BYTES = 16
CTA = 256               # threads, less where there are fewer vectors
FEW, FEW_CTA = 264 * CTA, 128   # vectors of all tokens that are spread as thinly as that: two CTAs an SM
DEEP = 4                # vectors of a thread
CPU_ROWS = 16
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
    if target.kind == "cpu": return [(Blocks(min(CPU_ROWS, spec.tokens.count), words.width), 1)]
    vector = math.gcd(VECTOR_BYTES // words.dtype.itemsize, words.width)
    pieces = words.width // vector
    few = spec.tokens.count * pieces <= FEW
    cta = FEW_CTA if few else CTA
    team = min(cta, power(pieces))
    deep = 1 if few else min(DEEP, -(-pieces // team))
    rows = max(32 // team, min(cta // team, power(spec.tokens.count)))
    if words.rows * words.width > LARGEST: rows = 1
    return [(Blocks(rows, team * deep * vector, 1, rows), max(1, team * rows // 32))]


def power(count: int) -> int:
    """The least power of two not below a number."""
    return 1 << (count - 1).bit_length()


def problems(spec: EmbeddingSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    return [f"{count} {name}, at most {MOST}" for name, count in
            (("rows", spec.rows), ("tokens", spec.tokens.count)) if count > MOST]


PROGRAMS = (TileProgram("embedding", EmbeddingSpec, embedding, grid, cut,
                        lambda spec: spec.tokens.count * spec.width, problems,
                        steps=lambda spec, blocks: [(as_words(spec), blocks)],
                        by_rows=("out", "tokens")),)
