"""Pieces of attention and of random numbers, made of other operations.

Protocol: `softmax_online(S)` gives, of scores (m, n), the block's probabilities exp(S - m_c), its maxima m_c
(m) and sums l_c (m); `softmax_accumulate(acc, m, l, P, V, m_c, l_c)` adds them to what earlier blocks made:

    m' = max(m, m_c);  acc' = acc exp(m - m') + (P exp(m_c - m')) V;  l' = l exp(m - m') + l_c exp(m_c - m')

(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023, FlashAttention-2). A row
without any score has m = -inf and l = 0. `philox` is Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), with
the counters that attention's kernels use for dropout (tile/attention/dropout.py).
"""
from __future__ import annotations

import math
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.dropout import SPAN, keep_256ths
from tinygrad_nv.tile.attention.spec import KEEP_ALL
from tinygrad_nv.tile.language.context import active
from tinygrad_nv.tile.language.elements import INF, exp2_nonpositive, maximum, where
from tinygrad_nv.tile.language.linear import dot
from tinygrad_nv.tile.language.memory import Block, TensorRef, load
from tinygrad_nv.tile.language.reductions import max_, sum_
from tinygrad_nv.tile.language.rounding import philox
from tinygrad_nv.tile.language.trace import current, fail
from tinygrad_nv.tile.language.values import Operand, Tile, cast, describe

LOG2E = 1 / math.log(2)


def row_index(block: Block | None = None) -> Tile:
    """The indices of the program's rows, or of a block's: (m, 1), int32."""
    return _block(block, "row_index").indices[:, None]


def col_index(block: Block | None = None) -> Tile:
    """The indices of a block's columns, by default the program's: (1, n), int32."""
    if block is None and (found := active()) is not None: block = found.n
    return _block(block, "col_index").indices[None, :]


def _block(block: Block | None, name: str) -> Block:
    if block is None and (found := active()) is not None: block = found.m
    if not isinstance(block, Block): fail(f"tile.{name} of {block!r}",
                                          "a block: of tile.context(), or of a loop")
    return block


def mask_causal(scores: Tile, rows: Tile, columns: Tile) -> Tile:
    """Scores of columns after their row become -inf, in the tile itself, which is also returned."""
    trace = current()
    made = where(columns <= rows, scores, -INF)
    maker = trace.defining_op(scores.value)
    if maker is None or maker not in trace.regions[-1].ops:
        fail("tile.mask_causal in a branch or loop that did not make the scores", "scores of the same body",
             "write scores = tile.where(cols <= rows, scores, -INF)")
    scores.value = made.value
    return scores


def softmax_online(scores: Tile) -> tuple[Tile, Tile, Tile]:
    """Probabilities (m, n), maxima and sums (m) of a block of scores (m, n): float32. In a loop over blocks
    whose last one reaches beyond its axis, what lies beyond counts as -inf."""
    if not isinstance(scores, Tile) or scores.ndim != 2:
        fail(f"tile.softmax_online of {describe(scores)}", "scores of two axes")
    wide, columns = cast(scores, dtypes.float32), _innermost()
    if columns is not None and columns.stop is not None and columns.size == scores.shape[1]:
        wide = where(col_index(columns) < columns.stop, wide, -INF)
    top = max_(wide, 1)
    p = exp2_nonpositive((wide - _finite(top)[:, None]) * LOG2E)
    return p, top, sum_(p, 1)


def softmax_accumulate(acc: Tile, m: Tile, l: Tile, p: Tile, v: Tile, m_c: Tile,
                       l_c: Tile) -> tuple[Tile, Tile, Tile]:
    """acc (m, d), m and l (m) with a block's probabilities p (m, n), values v (n, d), maxima and sums."""
    top = maximum(m, m_c)
    old, new = (exp2_nonpositive((each - _finite(top)) * LOG2E) for each in (m, m_c))
    made = dot(cast(p * new[:, None], v.dtype), v, acc * old[:, None])
    return made, top, l * old + l_c * new


def _finite(top: Tile) -> Tile: return where(top == -INF, 0.0, top)


def dropout_in_kernel(x: Tile, p: float, seed: Any = 0, rows: Tile | None = None,
                      columns: Tile | None = None) -> Tile:
    """x with elements dropped with probability p, rounded to a multiple of 1/256, and others scaled by what
    that leaves. `seed` is a number, two numbers, or a tensor of two uint32; rows and columns are by default
    the program's rows and the columns of the innermost loop of blocks. The same elements are dropped as
    by attention's kernels of this seed, whatever the blocks are."""
    if isinstance(p, Tile) or not 0 <= p < 1: fail(f"dropout with p={p!r}", "a constant from 0 to below 1")
    kept = keep_256ths(p)
    if kept == KEEP_ALL: return x
    rows = row_index() if rows is None else rows
    columns = col_index(_innermost()) if columns is None else columns
    found = active()
    matrix: Operand = 0 if found is None else found.batch
    words = philox(_key(seed), (rows, columns // SPAN * 4 + columns % 8 // 2, matrix, 0))
    byte = columns % SPAN // 8 * 2 + columns % 2
    which = byte // 4
    word = where(which < 2, where(which < 1, words[0], words[1]), where(which < 3, words[2], words[3]))
    value = (word >> cast(byte % 4 * 8, dtypes.uint32)) & 0xFF
    return where(cast(value, dtypes.int32) < kept, x * (KEEP_ALL / kept), 0.0)


def _key(seed: Any) -> tuple[Operand, Operand]:
    if isinstance(seed, TensorRef): return load(seed, 0), load(seed, 1)
    if isinstance(seed, tuple): return seed
    return seed & 0xFFFFFFFF, seed >> 32 if isinstance(seed, int) else 0


def _innermost() -> Block | None:
    found = current().block
    return found if isinstance(found, Block) else None
