"""Kernels of users under `vmap`: the bits of each example alone, by one kernel."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor as Plain
from tinygrad.dtype import dtypes

from tests.support.language.programs import PROGRAMS, UNORDERED
from tests.support.language.programs.case import Case, direct, tensor
from tinygrad_nv.errors import LanguageError, TransformError
from tinygrad_nv.explain import explain
from tinygrad_nv.language import *
from tinygrad_nv.tile.language.batching import batch_program

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
