"""Calls of kernels with what outputs contain before, and with sizes from dimensions. Kernels of users
under `vmap`: the bits of each example alone, by one kernel."""
from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad import Tensor as Plain
from tinygrad.dtype import DType

from tests.support.language.programs import PROGRAMS, UNORDERED
from tests.support.language.programs.case import Case, direct, tensor
from tinygrad_nv.errors import LanguageError, ShapeError, TransformError
from tinygrad_nv.explain import explain
from tinygrad_nv.language import *
from tinygrad_nv.language import KTile, OTile, cdiv, f32, int32, kernel, tile
from tinygrad_nv.tile.language.batching import batch_program


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


SCALES = (1.0, -0.5, 2.0)


def examples(case: Case) -> list[list[Plain]]:
    """Inputs that differ in their floats: indices stay what the program can follow."""
    return [[tensor(x * scale if dtypes.is_float(each.dtype) else x, each.dtype, "CPU")
             for x, each in zip(case.arrays(), case.inputs, strict=True)] for scale in SCALES]


def bits(made: Any) -> list[Any]:
    results = made if isinstance(made, tuple) else (made,)
    return [(each.float() if dtypes.is_float(each.dtype) else each).numpy() for each in results]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_every_program(case: Case):
    given = examples(case)
    whole = (Plain.stack(*each) for each in zip(*given, strict=True))
    made = bits(vmap(lambda *each: case.run(direct, *each))(*whole))
    alone = zip(*(bits(case.run(direct, *each)) for each in given), strict=True)
    for got, want in zip(made, map(np.stack, alone), strict=True):
        if case.name.startswith(UNORDERED):
            np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-20 * np.abs(want).max())
        else: np.testing.assert_array_equal(got, want)


@kernel
def product(a: KTile["M", "K", f32], b: KTile["K", "N", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc


@product.defvjp
def product_gradients(inputs: Any, outputs: Any, gradients: Any) -> Any:
    (a, b), (gradient,) = inputs, gradients
    return product(gradient, b.T.contiguous()), product(a.T.contiguous(), gradient)


@kernel(grid=lambda N: (2, 1, cdiv(N, 16)))
def shifted(x: KTile[2, "N", int32], out: OTile[2, "N", int32]):
    rows = tile.block(tile.program_id(2) * 16, 16)
    out[tile.program_id(0), rows] = x[tile.program_id(0), rows] + tile.program_id(2)


A, B = Plain.randn(4, 40, 24).realize(), Plain.randn(24, 33).realize()


def test_it_is_one_kernel_and_shared_arguments_stay():
    made = vmap(product, in_axes=(0, None))(A, B)
    assert [each.template for each in explain(made).kernels] == ["tile"]
    np.testing.assert_array_equal(made.numpy(), np.stack([product(A[i], B).numpy() for i in range(4)]))


def test_gradients_of_each_example():
    """What all examples share has a gradient for each."""
    def loss(a: Plain, b: Plain) -> Plain: return (product(a, b) ** 2).sum()
    given = [A[i].contiguous().realize() for i in range(4)]
    for made, want in zip(vmap(grad(loss, (0, 1)), in_axes=(0, None))(A, B),
                          zip(*(grad(loss, (0, 1))(a, B) for a in given), strict=True), strict=True):
        alone = np.stack([each.numpy() for each in want])
        np.testing.assert_allclose(made.numpy(), alone, rtol=1e-5, atol=1e-4)


def test_the_gradient_of_a_sum_over_examples():
    def loss(a: Plain, b: Plain) -> Plain: return (vmap(product, in_axes=(0, None))(a, b) ** 2).sum()
    def plain(a: Plain, b: Plain) -> Plain: return ((a @ b) ** 2).sum()
    for made, want in zip(grad(loss, (0, 1))(A, B), grad(plain, (0, 1))(A, B), strict=True):
        np.testing.assert_allclose(made.numpy(), want.numpy(), rtol=1e-5, atol=1e-3)


def test_examples_of_examples():
    x = Plain.arange(5 * 3 * 2 * 40).reshape(5, 3, 2, 40).cast(int32).realize()
    want = x.numpy() + np.arange(40) // 16
    np.testing.assert_array_equal(vmap(vmap(shifted))(x).numpy(), want)


def test_a_grid_of_three_axes_is_widened_along_x():
    x = Plain.zeros(2, 40, dtype=int32).contiguous()
    made = batch_program(shifted.program(x), 7, {"x"})
    assert made.grid == (14, 1, 3)


def test_under_jit():
    fn = jit(lambda a: vmap(product, in_axes=(0, None))(a, B))
    for seed in range(4):
        a = (A * (seed + 1)).realize()
        np.testing.assert_array_equal(fn(a).numpy(), np.stack([product(a[i], B).numpy() for i in range(4)]))


def test_what_cannot_be():
    x = Plain.zeros(2, 40, dtype=int32).contiguous()
    with pytest.raises(LanguageError, match="at most 2147483647"):
        batch_program(shifted.program(x), 2**26, {"x"})
    cache = donate(Plain.zeros(3, 2, 40, dtype=int32).contiguous().realize())
    with pytest.raises(TransformError, match="which writes into out"):
        vmap(lambda x, out: shifted(x, out=out))(Plain.zeros(3, 2, 40, dtype=int32).contiguous(), cache)
