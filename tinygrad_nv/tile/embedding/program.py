"""Rows of a table by number (spec.py), and its gradient, as programs of the tile language.

    a program of rows has some tokens, and a slice of columns; of `lanes` tokens at a time:
        read the tokens, count from the end what is below 0
        load the columns of their rows, 0 of no row; store
    a CPU's program of the gradient has columns, and its own part of two lists:
        from the last token to the first: following[t] = head[row], head[row] = t, where there is such a row
        for each row: add up the tokens of its chain, one after the other, in float32; store
    a GPU's gradient is three launches; each of their programs has:
        sort: some rows of the table. Goes through all tokens:
            count those of rows ahead of its own, and those of each of its own; sums of counts are offsets
            order[offset of the row + how many of the row came before] = token
        segments: SEGMENT places of the order, and a slice of columns:
            where SEGMENT tokens of a row begin there, counted from the row's first: add them up
        rows: some rows, and a slice of columns; of each row:
            add up the sums of its segments, then the tokens after the last of them; round, store

What a row holds does not matter: it is moved in words of four bytes, where rows allow. Programs of a CPU's
gradient, and those that sort, all go through all tokens, which makes their work the same whatever the tokens
are. A row of many tokens is the work of as many programs as it has segments, and of one that adds up a
SEGMENT-th of it. Nothing is added by atomics, so that the bits depend on the tokens alone.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.embedding.spec import SEGMENT, EmbeddingGradientSpec, EmbeddingSpec
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
SORT_WARPS, SORT_BLOCK = 16, 1 << 13    # of a program that sorts; tokens of it at a time
SORT_PROGRAMS, SORT_ROWS = 132, 1024     # an SM of an H100 each, as all read all tokens; rows of one at most
GRADIENT_ROWS = 16       # of a program that adds up
GRADIENT_CTA = 128
TOGETHER = 4            # rows of the gradient whose loads are under way at once
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


def sort(out: TensorRef, offsets: TensorRef, order: TensorRef, partials: TensorRef, tokens: TensorRef,
         grad: TensorRef, spec: EmbeddingGradientSpec, blocks: Blocks) -> None:
    """From tokens [*extents] to offsets [V + 1] and order [T]: those of row v are
    order[offsets[v]:offsets[v + 1]], in rising order."""
    count, bins = spec.tokens.count, blocks.columns
    first = tile.program_id(0) * bins
    if count <= blocks.rows:
        local = count_from(tokens, 0, first, spec, blocks)
        ranks, total = tile.ranks(local, bins)
        begins = tile.cumsum(total, 0) - total + count_ahead(local, first)
        put_in_order(order, 0, local, begins, ranks)
    else:
        total, before = tile.zeros((bins,), dtypes.int32), tile.full((), 0, dtypes.int32)
        for some in tile.range(0, count, blocks.rows):
            local = count_from(tokens, some, first, spec, blocks)
            total += tile.ranks(local, bins)[1]
            before += count_ahead(local, first)
        begins = place = tile.cumsum(total, 0) - total + before
        for some in tile.range(0, count, blocks.rows):
            local = count_from(tokens, some, first, spec, blocks)
            ranks, counts = tile.ranks(local, bins)
            put_in_order(order, some, local, place, ranks)
            place += counts
    offsets[tile.block(first, bins)] = begins


def count_from(tokens: TensorRef, some: Operand, first: Operand, spec: EmbeddingGradientSpec,
               blocks: Blocks) -> Tile:
    """The rows of a block of tokens, counted from `first` on."""
    block = tile.block(some, blocks.rows)
    row = find_rows(tokens, block, spec)
    if spec.tokens.count % blocks.rows: row = tile.where(block.indices < spec.tokens.count, row, NO_ROW)
    return row - first


def count_ahead(local: Tile, first: Operand) -> Tile:
    """How many rows are those ahead of `first`: as unsigned numbers what is of no row is beyond them."""
    row = tile.bitcast(local + first, dtypes.uint32)
    return tile.sum(tile.cast(row < tile.bitcast(first, dtypes.uint32), dtypes.int32), 0)


def put_in_order(order: TensorRef, some: Operand, local: Tile, begins: Tile, ranks: Tile) -> None:
    """Stores a block of tokens where their rows begin, and ranks behind."""
    row, rows = tile.bitcast(local, dtypes.uint32), begins.shape[0]
    place = tile.gather(begins, tile.bitcast(tile.minimum(row, rows - 1), dtypes.int32), 0) + ranks
    tile.store(order, tile.arange(local.shape[0]) + some, place, mask=row < rows)


def add_segments(out: TensorRef, offsets: TensorRef, order: TensorRef, partials: TensorRef,
                 tokens: TensorRef, grad: TensorRef, spec: EmbeddingGradientSpec, blocks: Blocks) -> None:
    """To partials [T / SEGMENT, H], float32, by the part of the order in which a segment begins."""
    part, columns = own_part(spec, blocks)
    last = (part + 1) * SEGMENT - 1
    if last < offsets[spec.rows]:
        # only the row that has the last place can have a segment that begins here and is whole
        row = find_rows(tokens, order[last], spec)
        begin, end = offsets[row], offsets[row + 1]
        first = last - (last - begin) % SEGMENT
        if first + SEGMENT <= end:
            total = add_tokens(tile.zeros((blocks.columns,)), order, grad, first, SEGMENT, columns)
            partials[part, columns] = tile.bitcast(total, dtypes.int32)


def add_rows(out: TensorRef, offsets: TensorRef, order: TensorRef, partials: TensorRef, tokens: TensorRef,
             grad: TensorRef, spec: EmbeddingGradientSpec, blocks: Blocks) -> None:
    """To out [V, H]."""
    part, columns = own_part(spec, blocks)
    first = part * blocks.rows
    bounds = offsets[tile.block(first, 2 * blocks.rows)]
    for i in tile.range(tile.minimum(blocks.rows, spec.rows - first)):
        begin, total = element(bounds, i), tile.zeros((blocks.columns,))
        count = element(bounds, i + 1) - begin
        whole = count // SEGMENT
        if segments(spec):
            for n in tile.range(0, whole, TOGETHER):
                its = [begin // SEGMENT + n + k for k in range(TOGETHER)]
                found = [partials[tile.where(n + k < whole, each, -1), columns] for k, each in enumerate(its)]
                for each in found: total += tile.bitcast(each, dtypes.float32)
        left = count - whole * SEGMENT
        if left > 0: total = add_tokens(total, order, grad, begin + whole * SEGMENT, left, columns)
        out[first + i, columns] = tile.cast(total, out.dtype)


def own_part(spec: EmbeddingGradientSpec, blocks: Blocks) -> tuple[Operand, Block]:
    """The number of a program's rows or segment, and its columns."""
    place, slices = tile.program_id(0), -(-spec.width // blocks.columns)
    return place // slices, tile.block(place % slices * blocks.columns, blocks.columns)


def add_tokens(total: Tile, order: TensorRef, grad: TensorRef, first: Operand, count: Operand,
               columns: Block) -> Tile:
    """A sum with up to SEGMENT tokens of the order."""
    tokens = tile.load(order, tile.arange(SEGMENT) + first, mask=tile.arange(SEGMENT) < count, other=0)
    for n in tile.range(0, count, TOGETHER):
        rows = [tile.where(n + k < count, element(tokens, n + k), -1) for k in range(TOGETHER)]
        found = [grad[row, columns] for row in rows]
        for each in found: total += tile.cast(each, dtypes.float32)
    return total


def element(x: Tile, i: Operand) -> Tile:
    """One element of a tile of one axis."""
    return tile.gather(x, tile.full((1,), i, dtypes.int32), 0).reshape()


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


def sort_cut(spec: EmbeddingGradientSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Tokens that are ranked at a time, and rows of the table."""
    rows, count = min(SORT_ROWS, -(-spec.rows // (32 * SORT_PROGRAMS)) * 32), spec.tokens.count
    # twice as many have registers where their places take none
    most = count if count == 2 * SORT_BLOCK and len(spec.tokens.extents) == 1 else SORT_BLOCK
    return [(Blocks(min(most, power(max(32, count))), rows), SORT_WARPS)]


def sort_grid(spec: EmbeddingGradientSpec, blocks: Blocks) -> Grid:
    """A program for each block of rows, and the end of the last one."""
    return spec.rows // blocks.columns + 1, 1, 1


def adding_blocks(spec: EmbeddingGradientSpec) -> Blocks:
    """Rows of a program, and a vector of each thread."""
    vector = math.gcd(VECTOR_BYTES // spec.dtype.itemsize, spec.width)
    return Blocks(GRADIENT_ROWS, max(32, math.gcd(spec.width // vector, GRADIENT_CTA)) * vector, 1, vector)


def adding_cut(spec: EmbeddingGradientSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """The blocks, and warps of a program."""
    blocks = adding_blocks(spec)
    return [(blocks, blocks.columns // (32 * blocks.lanes))]


def adding_grid(spec: EmbeddingGradientSpec, blocks: Blocks) -> Grid:
    """A program for each block of rows and of columns."""
    return -(-spec.width // blocks.columns) * -(-spec.rows // blocks.rows), 1, 1


def segment_grid(spec: EmbeddingGradientSpec, blocks: Blocks) -> Grid:
    """A program for each segment and block of columns."""
    return -(-spec.width // blocks.columns) * segments(spec), 1, 1


def segments(spec: EmbeddingGradientSpec) -> int:
    """Parts of the order; the tokens after the last whole one are no segment."""
    return spec.tokens.count // SEGMENT


def order_lists(spec: EmbeddingGradientSpec, blocks: Blocks) -> dict[str, tuple[int, ...]]:
    """The scratch in which launches of a gradient leave results to each other."""
    return {"offsets": (spec.rows + 1,), "order": (spec.tokens.count,),
            "partials": (max(1, segments(spec)), spec.width)}


def sort_storage(spec: EmbeddingGradientSpec, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`offsets` and `order` of the tokens of a storage, as the first launch leaves them."""
    storage, lies = given["tokens"], spec.tokens
    strides = [stride * storage.itemsize for stride in lies.strides]
    tokens = np.lib.stride_tricks.as_strided(storage[lies.offset:], lies.extents, strides).reshape(-1)
    rows = np.where(tokens < 0, tokens + spec.rows, tokens)
    known = np.flatnonzero((rows >= 0) & (rows < spec.rows))
    order = known[np.argsort(rows[known], kind="stable")]
    offsets = np.searchsorted(rows[order], np.arange(spec.rows + 1))
    return {"order": order.astype(np.int32), "offsets": offsets.astype(np.int32)}


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


ADD_ROWS = TileProgram("embedding_rows", EmbeddingGradientSpec, add_rows, adding_grid, adding_cut,
                       lambda spec: spec.rows * spec.width, scratch=order_lists,
                       steps=lambda spec, blocks: [(spec, adding_blocks(spec))])
ADD_SEGMENTS = TileProgram("embedding_segments", EmbeddingGradientSpec, add_segments, segment_grid,
                           adding_cut, lambda spec: segments(spec) * spec.width, scratch=order_lists,
                           following=ADD_ROWS,
                           steps=lambda spec, blocks: [(spec, adding_blocks(spec))] * (segments(spec) > 0))
PROGRAMS = (TileProgram("embedding", EmbeddingSpec, embedding, grid, cut,
                        lambda spec: spec.tokens.count * spec.width, problems, fixed=True,
                        steps=lambda spec, blocks: [(as_words(spec), blocks)],
                        by_rows=("out", "tokens")),
            TileProgram("embedding_gradient", EmbeddingGradientSpec, add_up, column_grid, gradient_cut,
                        lambda spec: spec.rows * spec.width, gradient_problems, fixed=True,
                        scratch=lists, kinds=("cpu",)),
            TileProgram("embedding_gradient", EmbeddingGradientSpec, sort, sort_grid, sort_cut,
                        lambda spec: spec.tokens.count, gradient_problems, fixed=True, scratch=order_lists,
                        held=sort_storage, entry=lambda spec: "embedding_sort", kinds=("gpu",),
                        following=ADD_SEGMENTS))
