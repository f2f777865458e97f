"""Layouts of tiles, against the formulas of the PTX manual, and what is known of integers, against their
values."""
from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language.gpu.layout import (
    NONE,
    Layout,
    accumulator,
    block_layout,
    broadcast_bits,
    extents,
    keeps_order,
    spread,
    transpose_bits,
)
from tinygrad_nv.tile.language.interpret import _Run
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.memory import TensorRef
from tinygrad_nv.tile.language.program import trace_program
from tinygrad_nv.tile.language.ranges import MOST, Ranges
from tinygrad_nv.tile.language.schedule import TileSchedule


def held(layout: Layout, thread: int) -> list[int]:
    """The indices that a thread holds, by register."""
    own = sum(1 << bit for at, bit in enumerate(layout.threads) if bit != NONE and thread >> at & 1)
    return [own | index for index in layout.indices]


def whole(layout: Layout, bits: int) -> None:
    """Every element is held, by as many threads as there are copies."""
    threads = 1 << len(layout.threads)
    found = Counter(index for thread in range(threads) for index in held(layout, thread))
    assert sorted(found) == list(range(1 << bits))
    assert set(found.values()) == {1 << layout.copies.bit_count()}


SHAPES = [(64,), (1000,), (3, 5), (64, 64), (1, 256), (128, 40), (4, 8, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warps", [0, 2, 3])
def test_blocked(shape: tuple[int, ...], warps: int) -> None:
    for vector in (1, 4, 8):
        made = block_layout(shape, len(shape) - 1, vector, 5 + warps)
        whole(made, extents(shape).bits)
        spare = max(extents(shape).bits - 5 - warps, 0)
        assert made.run(extents(shape).of_axis(len(shape) - 1)) >= min(
            vector, 1 << spare, 1 << extents(shape).widths[-1])


@pytest.mark.parametrize(("shape", "m", "n"), [((64, 64), 4, 1), ((128, 128), 2, 4), ((16, 16), 1, 1),
                                               ((32, 256), 2, 2), ((16, 64), 4, 1)])
def test_accumulators(shape: tuple[int, int], m: int, n: int) -> None:
    """PTX ISA, "Matrix Fragments for mma.m16n8k16": c0, c1 row g, columns 2 q, 2 q + 1; c2, c3 row g + 8."""
    made = accumulator(shape, m, n)
    whole(made, extents(shape).bits)
    for lane, i in itertools.product(range(32), range(4)):
        row, column = divmod(held(made, lane)[i], shape[1])
        assert (row, column) == (lane // 4 + 8 * (i >> 1), lane % 4 * 2 + (i & 1))


def test_wgmma_is_mma() -> None:
    """PTX ISA, "Register Fragments for wgmma.m64nNk16": register i of N / 2 in row 16 p + g + 8 (i / 2 % 2),
    column 8 (i / 4) + 2 q + i % 2."""
    made = accumulator((64, 128), 4, 1, True)
    for thread in range(128):
        lane, p = thread % 32, thread // 32
        indices = {divmod(index, 128) for index in held(made, thread)}
        wanted = {(16 * p + lane // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1))
                  for i in range(64)}
        assert indices == wanted


def test_slices_and_transposes() -> None:
    wide = accumulator((64, 32), 4, 1)
    rows = wide.without(broadcast_bits((64, 1), (64, 32)))
    whole(rows, 6)
    assert rows.count == 2
    turned = wide.move_bits(transpose_bits((64, 32), (1, 0)))
    for thread in (0, 37, 127):
        assert held(turned, thread) == [index % 32 * 64 + index // 32 for index in held(wide, thread)]
    for k_major, rows in ((False, False), (False, True), (True, False), (True, True)):
        whole(spread((64, 32), 7, k_major, rows), 11)


@pytest.mark.parametrize(("a", "b", "same"), [((4, 8), (32,), True), ((48,), (3, 16), True),
                                              ((6, 8), (48,), True), ((16, 3), (48,), False),
                                              ((5, 7), (7, 5), False),
                                              ((5,), (1, 5, 1), True)])
def test_reshapes_that_keep_places(a: tuple[int, ...], b: tuple[int, ...], same: bool) -> None:
    assert keeps_order(a, b) == same
    if not same: return
    left, right = (np.arange(1 << extents(shape).bits).reshape([1 << w for w in extents(shape).widths])
                   for shape in (a, b))
    inside = [x[tuple(map(slice, shape))].reshape(-1) for x, shape in ((left, a), (right, b))]
    np.testing.assert_array_equal(*inside)


# **** integers ****

def _expression(rng: random.Random, depth: int) -> Any:
    """A random expression of indices."""
    if depth == 0:
        return rng.choice([lambda: M.arange(32), lambda: C.program_id(0), lambda: C.program_id(1),
                           lambda: M.arange(32) * 0 + 8, lambda: M.arange(32) // 8])()
    a, b = _expression(rng, depth - 1), _expression(rng, rng.randrange(depth))
    number = rng.choice([1, 2, 3, 8, 16, 64])
    return rng.choice([lambda: a + b, lambda: a - b, lambda: a * number, lambda: a + number,
                       lambda: a // number, lambda: a % number, lambda: E.maximum(a, b),
                       lambda: E.minimum(a, number), lambda: a & number,
                       lambda: E.where(a < b, a, number), lambda: a << 2, lambda: a * b])()


@pytest.mark.parametrize("seed", range(60))
def test_ranges_hold(seed: int) -> None:
    """What is said of each value is true of it in every program."""
    def run(o):
        rng = random.Random(seed)
        for _ in range(4):
            x = _expression(rng, 3)
            y = x < _expression(rng, 1)
            if x.shape: M.store(o, x + 0, M.arange(32), mask=y & (M.arange(32) >= 0))
        for i in K.range_(C.program_id(0) * 4, 40, 4): M.store(o, i, 0)
        left = C.program_id(1) * rng.randrange(1, 9) - rng.randrange(9)
        while (left >= rng.randrange(-3, 3)) & ~(left < 0) & (left < rng.randrange(9, 40)):
            left = left * 2 + 1
    out = TensorParameter("o", dtypes.int32, (32,), output=True)
    made = trace_program(run, {"o": TensorRef(out)}, [out], TileSchedule(), (3, 5), None)
    ranges = Ranges(made)
    for x, y in itertools.product(range(3), range(5)):
        one = _Run(made, {"o": np.zeros(32, np.int32)}, (x, y, 0), False)
        one.region(made.body)
        for value, found in one.values.items():
            if dtypes.is_float(value.dtype): continue
            _true(ranges.of(value), np.atleast_1d(np.asarray(found, np.int64)))


def test_conditions_of_a_while_bound_its_body() -> None:
    """A list of indices that is gone through needs no check of each: what its condition says is known."""
    def run(o, x):
        i = x[0]
        while (i >= 0) & (i < 32):
            o[i] = 1
            i = x[i]
    tensors = [TensorParameter("o", dtypes.int32, (32,), output=True),
               TensorParameter("x", dtypes.int32, (32,))]
    made = trace_program(run, {each.name: TensorRef(each) for each in tensors}, tensors, TileSchedule(),
                         (1, 1), None)
    loop = next(op for op in made.body.walk() if op.name == "while")
    given, known = loop.regions[1].arguments[0], Ranges(made)
    assert (known.of(given).low, known.of(given).high) == (0, 31)
    assert known.of(loop.result).low < 0    # behind the loop it may be anything
    data = np.full(32, -1, np.int32)
    data[:3] = 5, -1, 40
    data[5] = 2
    written = np.zeros(32, np.int32)
    _Run(made, {"o": written, "x": data}, (0, 0, 0), False).region(made.body)
    assert list(np.flatnonzero(written)) == [2, 5]


def _true(known: Any, found: np.ndarray) -> None:
    assert known.low <= found.min()
    assert found.max() <= known.high
    extent = found.shape[-1]
    for group, grows in ((known.run, 1), (known.same, 0)):
        size = min(group, MOST)
        for first in range(0, extent, size):
            some = found[..., first:first + size]
            assert (some == some[..., :1] + grows * np.arange(some.shape[-1])).all()
    assert (found[..., ::min(known.run, extent)] % known.multiple == 0).all()
