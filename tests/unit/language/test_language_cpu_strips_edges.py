"""Strips of loops in C at their edges: rows and keys beyond tensors, products of bytes, branches that read
whole tiles, loops inside of loops. Every program is held against its meaning in NumPy, on every level of
instructions that this processor has."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.language import kernel as target
from tinygrad_nv.language import *
from tinygrad_nv.runtime.cpu.program import load

RANDOM = np.random.default_rng(5)
LEVELS = isa.there()


def require_right(made: Any, *given: np.ndarray, level: str = "portable", bound: float = 1e-4) -> None:
    """`given` are the inputs, in the order of the kernel's arguments."""
    tensors = [Tensor(each).realize() for each in given]
    want, program = made.interpret(*tensors), made.program(*tensors)
    out, left = np.full(want.shape, np.nan, np.float32), iter(given)
    arguments = [out if each.output else next(left) for each in program.tensors]
    load(target.build(program, isa.of_level(level)))(*arguments, threads=1)
    np.testing.assert_allclose(out, want, atol=bound * max(1.0, float(np.abs(want).max())))


def normal(*shape: int) -> np.ndarray: return RANDOM.standard_normal(shape).astype(np.float32)


def attend(q: Any, k: Any, v: Any, T: Any, window: int, codes: bool = False) -> Any:
    """Attention of a window, of keys that no mask bounds."""
    acc, m, l = tile.zeros((T.m, T.d), f32), tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    queries = tile.load(q, T.m, T.d)
    for block in tile.range_n(k.shape[0], T.n):
        s = tile.dot(queries, tile.load(k, block, T.d).T)
        r, c = tile.row_index(), tile.col_index(block)
        s = tile.where((c <= r) & (c > r - window), s, -INF)
        top = tile.maximum(m, tile.max(s, 1))
        base = tile.where(top == -INF, 0.0, top)
        p, old = tile.exp(s - base[:, None]), tile.exp(m - base)
        if codes: made = tile.cast(tile.dot(tile.cast(p * 100.0, int8), tile.load(v, block, T.d)), f32)
        else: made = tile.dot(p, tile.load(v, block, T.d))
        acc = acc * old[:, None] + made
        m, l = top, l * old + tile.sum(p, 1)
    return acc / tile.where(l == 0.0, 1.0, l)[:, None]


@kernel.schedule(Schedule(block=(64, 64)))
def narrow(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), 8)


@kernel.schedule(Schedule(block=(64, 64)))
def of_codes(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D", int8]) -> OTile["S", "D", f32]:
    return attend(q, k, v, tile.context(), 1 << 20, codes=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rows", "keys"), [(70, 70), (128, 70), (128, 128), (65, 1)])
def test_rows_that_see_no_key_of_a_block(rows: int, keys: int, level: str):
    require_right(narrow, normal(rows, 16), normal(keys, 16), normal(keys, 16), level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_behind_a_mask(level: str):
    v = RANDOM.integers(-50, 50, (128, 16)).astype(np.int8)
    require_right(of_codes, normal(128, 16), normal(128, 16), v, level=level, bound=0.02)


@kernel.schedule(Schedule(block=(64, 64)))
def branch(q: KTile["S", "D"], k: KTile["N", "D"], v: KTile["N", "D"], t: KTile["S", "N"], *,
           how: int) -> OTile["S", "D", f32]:
    """A branch that reads all rows of what strips would hold."""
    T = tile.context()
    acc = tile.zeros((T.m, T.d), f32)
    for block in tile.range_n(k.shape[0], T.n):
        b = tile.exp(tile.tanh(t[T.m, block]))
        s = tile.dot(tile.load(q, T.m, T.d), tile.load(k, block, T.d).T) + b
        x = s * b
        if block.start > 10:
            if how == 0: x = x + tile.sum(b, 0)[None, :]
            elif how == 1: x = x + b.T
            else: x = x + tile.dot(b, b)
        acc = tile.dot(x, tile.load(v, block, T.d), acc)
    return acc


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", range(3))
def test_a_branch_over_whole_tiles(how: int, level: str):
    made, given = branch, [normal(*shape) / 8 for shape in ((64, 16), (128, 16), (128, 16), (64, 128))]
    tensors = [Tensor(each.astype(np.float32)).realize() for each in given]
    want, program = made.interpret(*tensors, how=how), made.program(*tensors, how=how)
    out, left = np.full(want.shape, np.nan, np.float32), iter(given)
    arguments = [out if each.output else next(left).astype(np.float32) for each in program.tensors]
    load(target.build(program, isa.of_level(level)))(*arguments, threads=1)
    np.testing.assert_allclose(out, want, atol=1e-5 * float(np.abs(want).max()))


@kernel.schedule(Schedule(block=(64, 64)))
def nested(q: KTile["S", "D"], k: KTile["D", "E"]) -> OTile["S", "E", f32]:
    """A dot of what an inner loop carries."""
    acc, whole = tile.zeros((64, 64), f32), tile.block(0, 64)
    for i in tile.range(2):
        y = k[whole, whole] + tile.cast(i, f32)
        n = i
        while n < 3:
            y = tile.dot(q[whole, whole], y)
            n = n + 1
        acc = acc + y
    return acc


def test_a_loop_inside_carries_a_dot():
    require_right(nested, normal(64, 64) / 8, normal(64, 64) / 8)
