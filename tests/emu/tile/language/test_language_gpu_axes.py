"""Reductions, scans, sorts, gathers, atomics: kernels of the tile language on the emulated GPU against the
interpreter."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language.schedule import TileSchedule

F32, BF16, S32, S8, BOOL = dtypes.float32, dtypes.bfloat16, dtypes.int32, dtypes.int8, dtypes.bool
SHAPES = [(16, 64), (20, 48), (3, 5), (1, 256), (64, 1), (300, 6)]
shapes = pytest.mark.parametrize("shape", SHAPES)
axes = pytest.mark.parametrize("axis", [0, 1])
SOME = np.random.default_rng(0)


def reduced(x, o, *, fn, axis): o[:] = getattr(R, fn)(x[:, :], axis)


@pytest.mark.sampled(48)
@shapes
@axes
@pytest.mark.parametrize("fn", ["sum_", "max_", "min_", "prod"])
@pytest.mark.parametrize("dtype", [F32, BF16, S32, S8], ids=str)
def test_reductions(dtype: DType, fn: str, axis: int, shape: tuple[int, int]) -> None:
    """Of whole numbers: sums of floats are exact."""
    if fn == "prod" and dtypes.is_float(dtype): shape = shape[0] % 7 + 1, shape[1] % 7 + 1
    tensors = [ref("o", dtype, shape[1 - axis], out=True), ref("x", dtype, *shape)]
    checked(program(reduced, tensors, more={"fn": fn, "axis": axis}), integers=True, ulps=0.5)


@axes
@pytest.mark.parametrize("fn", ["any_", "all_"])
def test_booleans(fn: str, axis: int) -> None:
    x = SOME.random((12, 20)) < (0.1 if fn == "any_" else 0.9)
    tensors = [ref("o", BOOL, x.shape[1 - axis], out=True), ref("x", BOOL, *x.shape)]
    checked(program(reduced, tensors, more={"fn": fn, "axis": axis}), x=x)


@axes
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_sums_of_floats(warps: int, axis: int) -> None:
    """Against float64: no further than twice the interpreter's, which rounds once; 20 terms in a tree."""
    tensors = [ref("o", F32, (40, 72)[1 - axis], out=True), ref("x", F32, 40, 72)]
    made = program(reduced, tensors, more={"fn": "sum_", "axis": axis})
    found = [checked(made, TileSchedule(warps=warps), ulps=8, seeds=(seed,))["o"] for seed in (1, 2)]
    np.testing.assert_array_equal(*found)


def extreme(x, o, *, axis): o[:] = R.argmax(x[:, :], axis)


@shapes
@axes
def test_argmax(axis: int, shape: tuple[int, int]) -> None:
    """Of equal ones the first."""
    tensors = [ref("o", S32, shape[1 - axis], out=True), ref("x", F32, *shape)]
    checked(program(extreme, tensors, more={"axis": axis}), integers=True)


def affine(a, b, o, p, *, axis, reverse):
    def combine(a0: Any, b0: Any, a1: Any, b1: Any) -> tuple[Any, Any]: return a0 * a1, b0 * a1 + b1
    _, y = R.scan((a[:, :], b[:, :]), axis, combine, reverse)
    _, z = R.reduce((a[:, :], b[:, :]), axis, combine)
    o[:, :] = y
    p[:] = z


@pytest.mark.sampled(8)
@shapes
@axes
@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_what_does_not_commute(axis: int, reverse: bool, shape: tuple[int, int]) -> None:
    tensors = [ref("o", S32, *shape, out=True), ref("p", S32, shape[1 - axis], out=True),
               ref("a", S32, *shape),
               ref("b", S32, *shape)]
    checked(program(affine, tensors, more={"axis": axis, "reverse": reverse}))


def scanned(x, o, *, fn, axis, reverse): o[:, :] = getattr(R, fn)(x[:, :], axis, reverse)


@pytest.mark.sampled(12)
@shapes
@axes
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(axis: int, reverse: bool, shape: tuple[int, int]) -> None:
    tensors = [ref("o", S32, *shape, out=True), ref("x", S32, *shape)]
    checked(program(scanned, tensors, more={"fn": "cumsum", "axis": axis, "reverse": reverse}))


@pytest.mark.sampled(4)
@shapes
@axes
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, S32, S8], ids=str)
def test_sort(dtype: DType, descending: bool, axis: int, shape: tuple[int, int]) -> None:
    def sorted_(x, o): o[:, :] = R.sort(x[:, :], axis, descending)
    checked(program(sorted_, [ref("o", dtype, *shape, out=True), ref("x", dtype, *shape)]), ulps=0)


@pytest.mark.sampled(6)
@shapes
@axes
@pytest.mark.parametrize("dtype", [F32, BF16, S8], ids=str)
def test_gather(dtype: DType, axis: int, shape: tuple[int, int]) -> None:
    def gathered(x, i, o): o[:, :] = R.gather(x[:, :], i[:, :], axis)
    tensors = [ref("o", dtype, *shape, out=True), ref("x", dtype, *shape), ref("i", S32, *shape)]
    checked(program(gathered, tensors), ulps=0, i=SOME.integers(0, shape[axis], shape))


# **** atomics ****

def test_histogram_in_memory() -> None:
    def histogram(x, h): M.atomic_add(h, 1, x[C.block(C.program_id(0) * 60, 60)])
    tensors = [ref("h", S32, 16, out=True), ref("x", S32, 240)]
    checked(program(histogram, tensors, grid=(4,)), x=SOME.integers(0, 16, 240), h=np.zeros(16))


def test_a_sum_is_added_once() -> None:
    """By one thread of those that have it."""
    def total(x, h): M.atomic_add(h, R.sum_(x[C.block(C.program_id(0) * 60, 60)], 0), 0)
    tensors = [ref("h", F32, 1, out=True), ref("x", F32, 240)]
    checked(program(total, tensors, grid=(4,)), integers=True, ulps=0, h=np.zeros(1))


def test_all_threads_see_what_was_before() -> None:
    def ticket(c, o):
        k = M.atomic_add(c, 1, 0)
        o[k, :] = k * 3 + M.arange(40)
    tensors = [ref("o", S32, 8, 40, out=True), ref("c", S32, 1, out=True)]
    checked(program(ticket, tensors, grid=(8,)), c=np.zeros(1))


@pytest.mark.parametrize("fn", ["add", "max", "min", "and", "or", "xor", "exchange"])
def test_atomics(fn: str) -> None:
    def changed(c, o): o[:] = M.atomic(fn, c, M.arange(40) * 2 - 7, M.arange(40))
    tensors = [ref("o", S32, 40, out=True), ref("c", S32, 40, out=True)]
    checked(program(changed, tensors), c=SOME.integers(-50, 50, 40))
