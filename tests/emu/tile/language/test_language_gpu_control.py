"""Loops and branches, reductions, scans, sorts, gathers, atomics, and programs that random ones found:
kernels of the tile language on the emulated GPU against the interpreter."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, inputs, launched, program, ref
from tinygrad_nv.errors import LanguageError
from tinygrad_nv.language import *
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, BF16, S32 = dtypes.float32, dtypes.bfloat16, dtypes.int32


def summed(x, n, o):
    acc = E.zeros((48,), F32)
    for k in K.range_(0, M.load(n, 0)): acc = acc + x[k, :]
    o[:] = acc


@pytest.mark.parametrize("count", [0, 1, 9])
def test_for(count: int) -> None:
    """No iteration at all leaves what was carried in."""
    made = program(summed, [ref("o", F32, 48, out=True), ref("x", F32, 9, 48), ref("n", S32, 1)])
    checked(made, integers=True, ulps=0, n=np.array([count]))


def swapped(x, o):
    a, b = x[0, :], x[1, :]
    for _ in K.range_(0, 7): a, b = b, a + b
    o[0, :] = a
    o[1, :] = b


def test_carried_values_change_places() -> None:
    made = program(swapped, [ref("o", BF16, 2, 100, out=True), ref("x", BF16, 2, 100)])
    checked(made, integers=True, ulps=0)


def collatz(x, o):
    n, c = M.load(x, 0), 0
    while n != 1:
        if n % 2 == 0: n = n // 2
        else: n = 3 * n + 1
        c = c + 1
    o[0] = c


@pytest.mark.parametrize("first", [1, 27])
def test_while(first: int) -> None:
    checked(program(collatz, [ref("o", S32, 1, out=True), ref("x", S32, 1)]), x=np.array([first]))


def halved(x, o):
    v = x[:, :]
    while R.max_(R.max_(v, 1), 0) > 1.0: v = v * 0.5
    o[:, :] = v


def test_a_condition_through_shared_memory() -> None:
    made = program(halved, [ref("o", F32, 16, 50, out=True), ref("x", F32, 16, 50)])
    checked(made, ulps=0, x=np.random.default_rng(0).random((16, 50)).astype(np.float32) * 100)


def chosen(x, o):
    v = x[:]
    if R.sum_(v, 0) > 0:
        w = R.cumsum(v * 2.0, 0)
        M.store(o, 1.0, 100)
    else: w = v - 1.0
    o[V_BLOCK] = w + v


V_BLOCK = slice(0, 100)


@pytest.mark.parametrize("sign", [1, -1])
def test_if(sign: int) -> None:
    """What a branch makes of a value that both sides and the code behind use."""
    made = program(chosen, [ref("o", BF16, 101, out=True), ref("x", BF16, 100)])
    checked(made, integers=True, x=np.full(100, sign * 1.5, np.float32))


def nested(x, o):
    total = V.scalar(0, S32) + 0
    for i in K.range_(0, 5):
        for j in K.range_(i, 5):
            if (i + j) % 2 == 0: total = total + M.load(x, i * 5 + j)
    o[0] = total


def test_nested() -> None:
    checked(program(nested, [ref("o", S32, 1, out=True), ref("x", S32, 25)]))


S8, BOOL = dtypes.int8, dtypes.bool
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


def add_dots(a, b, o, looked):
    """Programs along y add dots to the same rows; with `looked`, something looks at the elements before."""
    i, j = C.block(C.program_id(0) * 16, 16), C.block(C.program_id(1) * 32, 32)
    before = M.atomic_add(o, L.dot(a[i, j], b[j, :]), i, slice(None))
    if looked: M.atomic_add(o, before * 0.0, i, slice(None))


def add_blocks(a, b, o, first):
    """Blocks of loaded numbers; `first`: the column at which they are added."""
    i = C.block(C.program_id(0) * 16, 16)
    M.atomic_add(o, V.cast(a[i, C.block(C.program_id(1) * 32, 32)], F32), i, C.block(first, 32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("fn", "columns", "more", "vector"), [
    (add_dots, 64, {"looked": False}, 2), (add_dots, 64, {"looked": True}, 2),
    (add_dots, 40, {"looked": False}, 2), (add_dots, 37, {"looked": False}, 1),
    (add_blocks, 64, {"first": 4}, 4), (add_blocks, 28, {"first": 8}, 4), (add_blocks, 64, {"first": 3}, 1),
    (add_blocks, 30, {"first": 6}, 2), (add_blocks, 64, {"first": -12}, 4)])
def test_vectors_of_floats_are_added(fn: Any, columns: int, more: dict[str, Any], vector: int,
                                     arch: str) -> None:
    """What lies side by side, is in the tensor or outside together, and is aligned, on sm_90a; rows end
    inside of a block. Elements that something looks at are changed alone."""
    tensors = [ref("o", F32, 40, columns, out=True), ref("a", BF16, 40, 96), ref("b", BF16, 96, columns)]
    made = program(fn, tensors, grid=(3, 3), more=more)
    checked(made, arch=arch, integers=True, ulps=0, seeds=(0, 1, 2, LATE), o=np.zeros((40, columns)))
    text = build(made, TileSchedule(), GPU(arch)).ptx
    found = re.findall(r"red[.a-z]+\.add\.(?:v(\d)\.)?f32", text)
    assert ("atom.relaxed.gpu.global.add.f32" in text) == more.get("looked", False)
    assert {int(each or 1) for each in found} == {vector if arch == "sm_90a" else 1}


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-6, 7, shape).astype(np.float32)


def same(made: Any, want: np.ndarray, *arrays: Any, dtype: Any = f32) -> None:
    """A kernel's results on the emulated GPUs and on the CPU, without findings."""
    given = [Tensor(each).cast(dtype).realize() for each in arrays]
    np.testing.assert_array_equal(made(*given).float().numpy(), want)
    for arch in ("sm_80", "sm_90a"):
        checked = made.check(*given, arch=arch)
        assert not checked.findings, checked
        np.testing.assert_array_equal(next(iter(checked.outputs.values())), want)


@kernel(grid=(1,))
def product(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16], out: OTile["M", "N", f32]):
    out[:, :] = tile.dot(a[:, :], b[:, :])


@pytest.mark.parametrize(("m", "k", "n"), [(33, 5, 17), (40, 8, 32), (33, 17, 16), (65, 3, 20)])
def test_products_of_odd_extents(m: int, k: int, n: int):
    a, b = numbers(m, k), numbers(k, n)
    same(product, a @ b, a, b, dtype=bf16)


def test_products_of_what_another_operation_reads():
    @kernel(grid=(1,))
    def both(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16], out: OTile["M", "N", f32]):
        x = a[:, :]
        y = tile.cast(tile.sum(tile.cast(x, f32), 0), bf16)[:, None] + b[:, :]
        out[:, :] = tile.dot(x, y)
    a, b = numbers(40, 8), numbers(8, 32)
    same(both, a @ (a.sum(0)[:, None] + b), a, b, dtype=bf16)


def test_blocks_that_begin_ahead_of_a_tensor():
    @kernel(grid=(1,))
    def shifted(a: KTile["M", "K", int8], b: KTile[20, "N", int8], out: OTile["M", "N", int32]):
        out[:, :] = tile.dot(a[:, tile.block(-1, 20)], b[:, :])
    a, b = numbers(17, 19), numbers(20, 16)
    same(shifted, a @ b[1:], a, b, dtype=int8)


def test_operands_are_read_before_shared_memory_is_used_again():
    @kernel(grid=(1,))
    def again(a: KTile["M", "K", f32], b: KTile["K", "M", f32], out: OTile["M", "M", f32]):
        first = tile.dot(a[:, :], tile.sort(b[:, :], 1))
        out[:, :] = tile.dot(tile.sort(first, 1), first)
    a, b = numbers(5, 3), numbers(3, 5)
    first = a @ np.sort(b, 1)
    same(again, np.sort(first, 1) @ first, a, b)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 2, 3), (16, 3, 1), (1, 5, 40)])
def test_sorts_beside_axes_that_are_padded(axis: int, shape: tuple[int, ...]):
    @kernel(grid=(1,))
    def ordered(x: KTile["A", "B", "C", f32], out: OTile["A", "B", "C", f32]):
        out[:, :, :] = tile.sort(x[:, :, :], axis)
    x = numbers(*shape)
    same(ordered, np.sort(x, axis), x)


def needed(x, o, p):
    a = x[:]
    o[:] = E.where_needed(a > 0.5, lambda: E.sqrt(a) * 2.0 + M.arange(a.shape[0]), a)
    p[:] = E.where_needed(R.sum_(a, 0) > 0.0, lambda: 1.0, a)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("n", [32, 300, 2048])
def test_what_a_thread_does_not_need_is_left_out(n: int, arch: str) -> None:
    tensors = [ref("o", F32, n, out=True), ref("p", F32, n, out=True), ref("x", F32, n)]
    made, schedule = program(needed, tensors), TileSchedule(warps=1)
    checked(made, schedule, arch, x=np.random.default_rng(n).standard_normal(n).astype(np.float32))
    for above in (0, 1, 2):     # elements of one thread
        x = np.full(n, -1, np.float32)
        x[4:4 + above] = 0.75
        checked(made, schedule, arch, x=x)
        _, report = launched(made, inputs(made, x=x), schedule, arch, 1)
        roots = sum(site.threads for site in report.stats.sites if site.opcode.startswith("sqrt"))
        assert roots == {32: above, 300: 12 * bool(above), 2048: 64 * bool(above)}[n]


def moved(x, o):
    a = x[:, :]
    low = R.sum_(a, 1)
    o[:, :] = E.where_needed(a > 1.5, lambda: E.interleave(low, low * 2.0), a)


@pytest.mark.parametrize("warps", [1, 4])
def test_what_needs_elements_of_other_threads_is_computed_by_all(warps: int) -> None:
    made = program(moved, [ref("o", F32, 32, 64, out=True), ref("x", F32, 32, 64)])
    checked(made, TileSchedule(warps=warps))


def test_what_is_left_out_is_of_elements() -> None:
    with pytest.raises(LanguageError, match=r"reduce in what tile.where_needed computes"):
        program(lambda x, o: o.__setitem__(0, E.where_needed(x[0] > 0, lambda: R.sum_(x[:], 0), 0.0)),
                [ref("o", F32, 1, out=True), ref("x", F32, 8)])
