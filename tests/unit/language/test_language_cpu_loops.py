"""Programs in C: what is computed where it is used, which stores are one loop, and which blocks are read as
they lie. Results are the interpreter's."""
from __future__ import annotations

import re
from typing import Any

import numpy as np

from tinygrad_nv.cpu.target import host
from tinygrad_nv.language import *

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((6, 40)).astype(np.float32)


def run(made: Any, *arrays: np.ndarray) -> tuple[list[np.ndarray], str]:
    """The results, and the C of one program."""
    given = [Tensor(x).cast(bf16).realize() if made is narrow else Tensor(x).realize() for x in arrays]
    results, seen = made(*given), made.interpret(*given)
    results, seen = ((each if isinstance(each, tuple) else (each,)) for each in (results, seen))
    found = [each.float().numpy() for each in results]
    for got, want in zip(found, seen, strict=True): np.testing.assert_array_equal(got, want)
    return found, made.source(*given).rpartition("NOINLINE void body")[2]


def count_loops(text: str) -> int:
    """Loops of a program: that over programs is of t."""
    return len(re.findall(r"for \(s64 [ij]", text))


@kernel(grid=(6,))
def halves(x: KTile["R", "N", f32], low: OTile["R", "N", f32], high: OTile["R", "N", f32]):
    row = tile.program_id(0)
    value = tile.sqrt(x[row, :] * x[row, :])
    low[row, :] = value * 2.0
    high[row, :] = value * 3.0


def test_stores_of_one_shape_are_one_loop():
    """They share what they compute, and no array holds it."""
    found, text = run(halves, X)
    np.testing.assert_allclose(found[1], 1.5 * found[0], rtol=1e-6)
    assert count_loops(text) == 1
    assert "aligned" not in text


@kernel(grid=(1,))
def scale_columns(x: KTile["R", "N", f32], gain: KTile["N", f32], out: OTile["R", "N", f32]):
    out[:, :] = x[:, :] * (tile.abs(gain[:]) + gain[:] * 2.0)[None, :]


def test_what_many_rows_repeat_is_computed_once():
    """Of few rows it is computed for each: an array costs more."""
    gain = X[0]
    for rows, arrays in ((6, 0), (24, 1)):
        _, text = run(scale_columns, np.tile(X, (4, 1))[:rows], gain)
        assert text.count("aligned") == arrays


@kernel(grid=(6,))
def apart(x: KTile["R", "N", f32], out: OTile["R", "N", f32]):
    row = tile.program_id(0)
    out[row, tile.block(0, 20)] = x[row, tile.block(20, 20)]
    out[row, tile.block(20, 20)] = x[row, tile.block(0, 20)]


@kernel(grid=(6,))
def over(x: KTile["R", "N", f32], out: OTile["R", "N", f32]):
    row = tile.program_id(0)
    out[row, tile.block(0, 24)] = x[row, tile.block(0, 24)]
    out[row, tile.block(16, 24)] = x[row, tile.block(16, 24)] * 2.0


def test_stores_that_overlap_are_not():
    found, text = run(over, X)
    np.testing.assert_array_equal(found[0], np.concatenate([X[:, :16], 2 * X[:, 16:]], 1))
    assert count_loops(text) == 2
    found, text = run(apart, X)
    np.testing.assert_array_equal(found[0], np.roll(X, 20, 1))
    assert count_loops(text) == 1


@kernel(grid=(6,))
def swap_halves(x: KTile["R", "N", f32], out: OTile["R", "N", f32]):
    row, low, high = tile.program_id(0), tile.block(0, 20), tile.block(20, 20)
    out[row, :] = x[row, :]
    left, right = out[row, low], out[row, high]
    out[row, low] = right
    out[row, high] = left


def test_what_is_read_of_an_output_is_what_was_there():
    found, _ = run(swap_halves, X)
    np.testing.assert_array_equal(found[0], np.roll(X, 20, 1))


@kernel(grid=(2,))
def swap_axes(x: KTile["A", "B", "N", f32], out: OTile["B", "A", "N", f32]):
    column = tile.block(tile.program_id(0) * 32, 32)
    out[:, :, column] = tile.transpose(x[:, :, column], 1, 0, 2) + 1.0


def test_outer_axes_are_transposed_as_they_are_read():
    x = RANDOM.standard_normal((3, 5, 40)).astype(np.float32)       # the second block reaches beyond
    found, text = run(swap_axes, x)
    np.testing.assert_array_equal(found[0], x.transpose(1, 0, 2) + 1)
    assert "aligned" not in text


@kernel(grid=(6,))
def narrow(x: KTile["R", "N", bf16], out: OTile["R", "N", bf16], rest: OTile["R", "N", bf16]):
    row = tile.program_id(0)
    value = tile.cast(x[row, :], f32)
    out[row, :] = tile.cast(value * 1.00390625, bf16)
    rest[row, :] = tile.cast(tile.cast(value * 3.0, bf16) * 5.0, bf16)


def test_stores_round_once():
    """Ties included: 1 + 2⁻⁸ times a number of eight bits lies between two others."""
    _, text = run(narrow, np.concatenate([X, np.arange(1, 241, dtype=np.float32).reshape(6, 40)], 1))
    assert text.count("round_bf16") == 2        # of the product that is multiplied again


@kernel(grid=lambda N: (cdiv(N, 32),))
def windows(x: KTile["N", f32], out: OTile["N", f32]):
    column = tile.block(tile.program_id(0) * 32, 32)
    out[column] = x[column] * 2.0


def test_blocks_that_lie_inside_are_read_as_they_lie():
    for count, inside in ((96, True), (100, False)):
        x = RANDOM.standard_normal(count).astype(np.float32)
        found, text = run(windows, x)
        np.testing.assert_array_equal(found[0], 2 * x)
        assert ("window_" in text) is not inside


@kernel(grid=(6,))
def twice(x: KTile["R", "N", f32], out: OTile["R", "N", f32], rest: OTile["R", "N", f32]):
    row = tile.program_id(0)
    out[row, :] = x[row, :]
    for _ in tile.range(3): out[row, :] = tile.sqrt(out[row, :] * out[row, :] + 1.0)
    for _ in tile.range(2):
        before = out[row, :]
        out[row, :] = x[row, :]
        rest[row, :] = before * 2.0


def test_an_output_is_read_where_it_lies_until_it_is_written():
    """An element that is made of the one at its place needs no copy."""
    found, text = run(twice, X)
    np.testing.assert_allclose(found[1], 2 * X, rtol=0)
    assert "aligned" not in text


@kernel(grid=(6,))
def by_lane(x: KTile["R", "N", f32], out: OTile["R", 32, f32]):
    row = tile.program_id(0)
    out[row, :] = tile.max(x[row, :].reshape(3, 32), 0)


def test_rows_of_a_block_are_read_where_they_lie():
    x = RANDOM.standard_normal((6, 96)).astype(np.float32)
    found, text = run(by_lane, x)
    np.testing.assert_array_equal(found[0], x.reshape(6, 3, 32).max(1))
    assert "aligned" not in text


@kernel(grid=lambda N: (cdiv(N, 32),))
def multiply_add(x: KTile["N", f32], y: KTile["N", f32], z: KTile["N", f32], out: OTile["N", f32]):
    n = tile.block(tile.program_id(0) * 32, 32)
    out[n] = tile.fma(x[n], y[n], z[n])


def test_fma_rounds_once():
    """x · x − rounded(x · x) is what a product loses."""
    x = RANDOM.standard_normal(100).astype(np.float32)
    lost = np.float64(x) * x - x * x
    found, _ = run(multiply_add, x, x, -x * x)
    np.testing.assert_array_equal(found[0], lost.astype(np.float32))
    assert np.count_nonzero(lost) > 50


@kernel(grid=(1,))
def powers(x: KTile["N", f32], a: KTile["N", "N", f32], b: KTile["N", f32], out: OTile["N", f32],
           rest: OTile["N", f32]):
    h = x[:]
    for _ in tile.range(3): h = tile.sum(h[:, None] * a[:, :], 0)
    out[:] = h
    h = x[:]
    for _ in tile.range(3): h = b[:] + tile.sum(h[:, None] * a[:, :], 0)
    rest[:] = h


@kernel(grid=(1,))
def turning(x: KTile["A", "A", "N", f32], out: OTile["A", "A", "N", f32]):
    s = x[:, :, :]
    for _ in tile.range(3): s = tile.transpose(s + 1.0, 1, 0, 2)
    out[:, :, :] = s


def test_what_a_loop_carries_is_read_before_it_is_written():
    n = 64
    run(powers, *(RANDOM.integers(-2, 3, shape).astype(np.float32) for shape in ((n,), (n, n), (n,))))
    run(turning, RANDOM.standard_normal((3, 3, 40)).astype(np.float32))


@kernel(grid=(1,))
def deep(x: KTile["N", f32], z: KTile["N", f32], out: OTile["N", f32], rest: OTile["N", f32]):
    y, c = x[:], z[:]
    for _ in range(40): y = y * y + c
    out[:] = y
    rest[:] = y * 2.0


def test_what_is_used_many_times_is_looked_at_once():
    """Two uses of each of 40 values are 2⁴⁰ paths."""
    x = RANDOM.uniform(-0.5, 0.5, 40).astype(np.float32)
    run(deep, x, x)


@kernel(grid=(2,))
def beyond(x: KTile["M", "N", f32], sums: OTile["G", "N", f32], most: OTile["G", "N", f32]):
    program = tile.program_id(0)
    a = x[tile.block(program * 32, 32), :]
    sums[program, :] = tile.sum(tile.transpose(a), 1)
    most[program, :] = tile.max(a, 0)


def test_a_transpose_reads_nothing_beyond_the_tensor():
    x = RANDOM.integers(1, 5, (40, 64)).astype(np.float32)
    found = beyond(Tensor(x), Tensor.zeros(2, 64), Tensor.zeros(2, 64))
    parts = x[:32], np.concatenate([x[32:], np.zeros((24, 64), np.float32)])
    np.testing.assert_array_equal(found[0].numpy(), np.stack([part.sum(0) for part in parts]))
    np.testing.assert_array_equal(found[1].numpy(), np.stack([part.max(0) for part in parts]))


@kernel(grid=(3,))
def store_below(x: KTile["N", f32], out: OTile["N", f32]):
    below = tile.cast(tile.program_id(0), uint32) - 1           # 2³² − 1 in the first program
    i = tile.cast(tile.maximum(below, 0), int32)
    out[i] = x[tile.program_id(0)]


def test_indices_that_wrap_around_lie_outside():
    given = Tensor([1.0, 2.0, 3.0]), Tensor.zeros(3)
    np.testing.assert_array_equal(store_below(*given).numpy(), [2, 3, 0])
    store = next(line for line in store_below.source(*given).splitlines() if "*(p_out" in line)
    assert store.startswith("if ((u64)")


@kernel(grid=(6,))
def swapped(x: OTile["R", "N", f32], y: OTile["R", "N", f32]):
    row = tile.program_id(0)
    a, b = x[row, :], y[row, :]
    x[row, :] = b * 2.0
    y[row, :] = a * 3.0


def test_rows_change_in_place():
    """One loop and no array: what a store replaces is read ahead of it."""
    (x, y), text = run(swapped, X, X + 1)
    np.testing.assert_array_equal(x, (X + 1) * 2)
    np.testing.assert_array_equal(y, X * 3)
    assert count_loops(text) == 1
    assert "float t" not in text


@kernel(grid=(6,))
def moved(x: OTile["R", "N", f32]):
    row = tile.program_id(0)
    a = x[row, tile.block(0, 39)]
    x[row, tile.block(1, 39)] = a * 2.0


def test_another_place_is_not_in_place():
    (x,), text = run(moved, X)
    np.testing.assert_array_equal(x[:, 1:], X[:, :-1] * 2)
    assert "float t" in text


@kernel(grid=(6,))
def extremes(x: KTile["R", "N", f32], least: OTile["R", 32, f32], most: OTile["R", 32, f32]):
    row = tile.program_id(0)
    low, high = tile.full((32,), 9.0), tile.full((32,), -9.0)
    for n in tile.range(0, 96, 32):
        part = x[row, tile.block(n, 32)]
        scaled = part * part * part * 0.5
        low, high = tile.minimum(low + high * 0.0, scaled), tile.maximum(high, scaled)
    least[row, :], most[row, :] = low, high


def test_what_a_loop_carries_of_one_shape_is_one_loop():
    """What both are made of is computed once, in no array, and neither is written before both are read."""
    found, text = run(extremes, RANDOM.standard_normal((6, 96)).astype(np.float32))
    assert (found[0] <= found[1]).all()
    body = text.partition("for (s32")[2].partition("(p_least")[0]
    assert len(re.findall(r"load_f32\(p_x", body)) == 32 // host().isa.lanes
    assert "aligned" not in body


@kernel(grid=(1,))
def turns(x: KTile["N", f32], y: KTile["N", f32], out: OTile["2*N", f32], again: OTile["2*N", f32]):
    out[:] = tile.interleave(x[:], y[:])
    a, b = tile.zeros((out.shape[0],), f32), tile.ones((out.shape[0],), f32)
    for _ in tile.range(3):
        word = tile.interleave(x[:] * x[:], y[:])
        a, b = word + b, word * a + b * 0.5
    again[:] = a - b


def test_elements_in_turn():
    """Of what a loop carries, too: they are not written before all are read."""
    for n in (1, 5, 16, 24, 64, 100):
        x, y = RANDOM.standard_normal((2, n)).astype(np.float32)
        found, _ = run(turns, x, y)
        np.testing.assert_array_equal(found[0].reshape(n, 2), np.stack([x, y], -1))


@kernel(grid=(1,))
def rarely(x: KTile["N", f32], out: OTile["N", f32]):
    value = x[:]
    out[:] = tile.where_needed(value > 3.0, lambda: tile.sqrt(value) + tile.arange(value.shape[0]), value)


def test_what_a_vector_does_not_need_is_left_out():
    for n in (7, 40, 1000):
        x = RANDOM.standard_normal(n).astype(np.float32)
        x[n // 2] = 4.0
        _, text = run(rarely, x)
        assert text.index("if (any_(") < text.index("sqrt_(")


@kernel(grid=(1,))
def halve_rows(x: KTile["R", "N", f32], out: OTile["N", f32]):
    total = tile.zeros((x.shape[1],), f32)
    for i in tile.range(x.shape[0], unroll=False): total = total * 0.5 + x[i, :]
    out[:] = total


def test_a_loop_that_is_compiled_once():
    x = RANDOM.integers(0, 9, (5, 40)).astype(np.float32)
    given = Tensor(x), Tensor.zeros(40)
    wanted = (x * 0.5 ** np.arange(4, -1, -1)[:, None]).sum(0)
    np.testing.assert_array_equal(halve_rows(*given).numpy(), wanted)
    assert "unroll(disable)" in halve_rows.source(*given)


@kernel(grid=(6,))
def to_pages(x: KTile["R", "N", f32], at: KTile["R", int32], out: OTile["P", 2, "H", f32]):
    row, n = tile.program_id(0), tile.block(0, 20)
    page = at[row]
    out[page, 0, n] = x[row, n]
    out[page, 1, n] = x[row, tile.block(20, 20)] + 1.0


def test_whether_a_page_is_there_is_asked_ahead_of_the_loop():
    """A program whose page is none writes nothing."""
    pages = np.array([2, -1, 0, 3, 9, 1], np.int32)
    found, text = run(to_pages, X, pages, np.zeros((4, 2, 20), np.float32))
    wanted = np.zeros((4, 2, 20), np.float32)
    for row, page in enumerate(pages):
        if 0 <= page < 4: wanted[page] = X[row, :20], X[row, 20:] + 1
    np.testing.assert_array_equal(found[0], wanted)
    assert text.index("if ((u64)") < text.index("for (s64 j")
    assert text.count("if ((u64)") == 1


@kernel(grid=(6,))
def turned(x: KTile["R", "N", f32], out: OTile["R", "N", f32]):
    a, b = tile.deinterleave(x[tile.program_id(0), :])
    out[tile.program_id(0), :] = tile.interleave(tile.sqrt(a * a), b * 3.0)


def test_pairs_are_computed_once():
    """One loop over pairs of vectors stores both."""
    found, text = run(turned, X)
    np.testing.assert_array_equal(found[0][:, ::2], np.abs(X[:, ::2]))
    np.testing.assert_array_equal(found[0][:, 1::2], 3 * X[:, 1::2])
    assert text.count("sqrt_(") == 1


@kernel(grid=(6,))
def add_cubes(x: KTile["R", "N", f32], out: OTile["R", f32], most: OTile["R", f32]):
    row = tile.program_id(0)
    value = x[row, :]
    a, b = tile.deinterleave(value * value * value)
    out[row] = tile.sum(a)
    most[row] = tile.max(a) + tile.max(b)


def test_pairs_of_what_takes_time_are_an_array():
    """A vector of even elements is made of two, which each loop would compute again."""
    found, text = run(add_cubes, RANDOM.integers(-3, 4, (6, 64)).astype(np.float32))
    assert len(found) == 2
    assert text.count("aligned") == 1
