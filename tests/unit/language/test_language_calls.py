"""Calls of kernels with what outputs contain before, and with sizes from dimensions."""
from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import ShapeError
from tinygrad_nv.language import KTile, OTile, cdiv, f32, int32, kernel, tile


@kernel(grid=(1,))
def totals(x: KTile["n", f32], p: OTile[1, f32], q: OTile[2, f32]):
    total = tile.sum(x[tile.block(0, 16)])
    tile.atomic_add(p, total, 0)
    tile.atomic_add(q, total, 1)


@kernel(grid=(1,))
def same(x: KTile["n"], out: OTile["n"]): out[0] = x[0]


@kernel(grid=lambda n, half: (n + half,))
def counted(x: KTile["n", "2*half", f32], out: OTile["n", f32], *, n: int, half: int):
    tile.store(out, float(half), tile.program_id(0), mask=tile.program_id(0) < n)


def full(value: float, *shape: int) -> Tensor: return Tensor.full(shape, float(value)).contiguous().realize()


def test_results_that_are_realized_one_by_one():
    p, q = totals(full(1, 10))
    assert (p.item(), q.tolist(), p.item()) == (10, [0, 10], 10)


def test_tensors_that_are_given_for_outputs_stay():
    before, also = full(5, 1), full(7, 2)
    p, q = totals(full(1, 10), before, also)
    assert (p.item(), q.tolist()) == (15, [7, 17])
    assert (before.item(), also.tolist()) == (5, [7, 7])


def test_calls_that_go_on_from_each_other():
    p = full(0, 1)
    for _ in range(3): p, _ = totals(full(1, 10), p)
    assert p.item() == 30


def test_outputs_of_captured_calls_begin_anew():
    @TinyJit
    def step(x: Tensor, p: Tensor): return tuple(each.realize() for each in totals(x, p))
    for i in range(4):
        p, q = step(full(i, 10), full(5, 1))
        assert (p.item(), q.tolist()) == (5 + 10 * i, [0, 10 * i])


@pytest.mark.parametrize("dtype", [dtypes.bool, dtypes.int8, dtypes.uint32, dtypes.bfloat16, dtypes.float32])
def test_contents_of_every_dtype(dtype: DType):
    before = Tensor([0, 1, 3, -0.0, 2]).cast(dtype).realize()
    made = same(full(1, 5).cast(dtype).realize(), before)
    want = before.cast(f32).numpy()
    np.testing.assert_array_equal(made.cast(f32).numpy(), [1, *want[1:]])


def test_arguments_named_as_dimensions_have_their_sizes():
    assert counted(full(0, 3, 8)).tolist() == [4] * 3
    assert counted(full(0, 3, 8), n=3).tolist() == [4] * 3


@kernel
def one_axis(x: KTile["N", f32]):
    T = tile.context()
    return x[T.m] * 2


@kernel
def one_axis_by_columns(x: KTile["N", f32], out: OTile["N", f32]):
    T = tile.context()
    out[T.n] = x[T.n] * 2


@kernel
def columns_of(x: KTile["M", "N", f32]) -> OTile["N", f32]:
    T = tile.context()
    total = tile.zeros((T.m,), f32)
    for rows in tile.range_k(x.shape[0], T.k): total = total + tile.sum(x[rows, T.m], 0)
    return total


@pytest.mark.parametrize("n", [1, 64, 65, 200])
@pytest.mark.parametrize("made", [one_axis, one_axis_by_columns])
def test_results_with_one_axis_are_cut_into_blocks(made: Any, n: int):
    x = Tensor.arange(n).float().contiguous().realize()
    np.testing.assert_array_equal(made(x).numpy(), 2 * np.arange(n))
    assert np.prod(made.program(x).grid) == cdiv(n, 64)


def test_sums_with_one_axis_are_cut_into_blocks():
    x = Tensor.ones(300, 70).contiguous().realize()
    for made in (columns_of(x).numpy(), columns_of.interpret(x)):
        np.testing.assert_array_equal(made, np.full(70, 300))


def test_the_longer_spelling_of_annotations():
    """That which type checkers without a plugin accept."""
    @kernel
    def doubled(x: Annotated[Tensor, KTile["N", f32]]) -> Annotated[Tensor, OTile["N", f32]]:
        T = tile.context()
        return tile.load(x, T.m) * 2
    np.testing.assert_array_equal(doubled(Tensor.ones(70)).numpy(), np.full(70, 2))
    with pytest.raises(ShapeError, match="argument x"): doubled(Tensor.ones(70, 2))


# **** programs that follow outputs ****

@kernel
def into(a: KTile["M", "K", f32], b: KTile["K", "N", f32], out: OTile["M", "N", f32]):
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    out[T.m, T.n] = acc


@pytest.mark.parametrize(("m", "k", "n"), [(100, 30, 200), (1, 200, 65), (70, 1, 1)])
def test_programs_follow_outputs(m: int, k: int, n: int):
    a, b = np.arange(m * k).reshape(m, k) % 7, np.arange(k * n).reshape(k, n) % 5
    x, y = (Tensor(each.astype(np.float32)) for each in (a, b))
    np.testing.assert_array_equal(into(x, y).numpy(), a @ b)


def test_what_depends_on_no_block_is_done_once():
    @kernel
    def total(x: KTile["M", "N", f32], out: OTile[1, f32]):
        made = tile.zeros((), f32)
        for rows in tile.range_m(x.shape, 16): made += tile.sum(x[rows, :])
        tile.atomic_add(out, made, 0)
    x = full(1, 200, 100)
    assert total.program(x).grid == (1, 1, 1)
    assert total(x).item() == 20000


# **** values around a kernel ****

FACTOR = 2.0


def by_factor(x: Any) -> Any: return x * FACTOR


def test_kernels_see_new_values_around_them(monkeypatch: pytest.MonkeyPatch):
    more = 1.0

    @kernel
    def changed(x: KTile["N", f32], *, least: float = -10.0) -> OTile["N", f32]:
        T = tile.context()
        return tile.maximum(by_factor(x[T.m]) + more, least)
    x = full(3, 2)
    assert changed(x).tolist() == [7, 7]
    more = 2.0
    assert changed(x).tolist() == [8, 8]
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert changed(x).tolist() == [17, 17]
    monkeypatch.undo()
    before = len(changed._programs)
    assert changed(x).tolist() == [8, 8]
    assert len(changed._programs) == before


class Holder:
    def __init__(self, value: float) -> None: self.value = value
    def __float__(self) -> float: return float(self.value)


@pytest.mark.parametrize("of", [np.float32, Holder])
def test_kernels_see_new_objects_at_the_address_of_old_ones(of: Any):
    """Numbers of NumPy count by their values, and other objects live as long as a program that read them."""
    held = of(0)

    @kernel
    def scaled(x: KTile["N", f32]) -> OTile["N", f32]: return x[tile.context().m] * float(held)
    x, found = full(1, 2), []
    for i in range(50):
        held = of(i)
        found += scaled.interpret(x).tolist()
    assert found == [each for i in range(50) for each in (i, i)]


def test_constants_differ_by_their_sign():
    @kernel
    def constant(x: KTile["N", f32], *, c: float) -> OTile["N", f32]: return tile.full((tile.context().m,), c)
    assert [np.signbit(constant(full(1, 2), c=c).numpy()).all() for c in (0.0, -0.0)] == [False, True]


def test_tensors_of_python_numbers():
    @kernel
    def scaled(x: KTile["N", f32], by: KTile[f32]) -> OTile["N", f32]: return x[tile.context().m] * by
    assert [scaled(full(2, 3), Tensor(each)).tolist() for each in (3.0, 3)] == [[6] * 3] * 2


@kernel(grid=(1,))
def divided(x: KTile["n"], y: KTile["n"], q: OTile["n", int32], r: OTile["n", int32]):
    i = tile.block(0, 16)
    q[i] = x[i] // y[i]
    r[i] = x[i] % y[i]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_divisions_by_0_are_0_and_leave_0(dtype: type):
    x, y = np.array([-7, 7, 0, -8, 9, 5]), np.array([0, 0, 0, 3, -4, 2])
    if dtype is np.uint32: x, y = abs(x), abs(y)
    q, r = divided(*(Tensor(each.astype(dtype)) for each in (x, y)))
    with np.errstate(divide="ignore"): want = (x // y).tolist(), (x % y).tolist()
    assert (q.tolist(), r.tolist()) == want
