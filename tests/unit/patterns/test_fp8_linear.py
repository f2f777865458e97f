"""A linear layer in FP8 on a CPU: its three matmuls are those of the rounded operands, and near to the exact
ones.

Bounds: operands are rounded to 2^-4 (e4m3) or 2^-3 (e5m2) of themselves, at most, above the smallest normal
number. Sums of K products with independent roundings are off by that over √3 times the root of the sum of
their squares, on average; asserted is the root mean square over all results."""
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tinygrad_nv import Tensor, TinyJit, dtypes
from tinygrad_nv.functional import Fp8Linear, fp8_linear
from tinygrad_nv.quant.fp8 import FORMATS, by_block, by_tensor
from tinygrad_nv.quant.tensor import numbers_of

HOWS = [Fp8Linear(), Fp8Linear(backward="e4m3"), Fp8Linear(backward="e4m3", blocks=True)]
T, K, N = 52, 144, 80


def given(dtype: Any = dtypes.float32) -> list[Tensor]:
    """x, w, gradient."""
    random = np.random.default_rng(0)
    shapes = (4, T // 4, K), (N, K), (4, T // 4, N)
    made = [Tensor(random.standard_normal(shape).astype(np.float32)).cast(dtype).contiguous()
            for shape in shapes]
    Tensor.realize(*made)
    return made


def derived(how: Fp8Linear, x: Tensor, w: Tensor, g: Tensor,
            scales: tuple[Tensor, Tensor, Tensor] | None = None) -> list[np.ndarray]:
    """The result, the gradients of x and w, and the meter's."""
    meter = Tensor.zeros(9).contiguous().realize()
    y = fp8_linear(how, x, w, scales, meter)
    made = [y, *(y * g).sum().gradient(x, w, meter)]
    Tensor.realize(*made)
    assert [each.dtype for each in made] == [x.dtype, x.dtype, w.dtype, dtypes.float32]
    return [each.float().numpy().astype(np.float64) for each in made]


@functools.cache
def found(how: Fp8Linear) -> list[np.ndarray]:
    """`derived` of float32 operands without scales."""
    return derived(how, *given())


def flat(x: Tensor) -> np.ndarray: return x.float().numpy().astype(np.float64).reshape(-1, int(x.shape[-1]))


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_gradients_beside_float64(how: Fp8Linear):
    x, w, g = given()
    y, dx, dw, _ = found(how)
    fine, coarse = (2.0 ** -(FORMATS[name].mantissa + 1) for name in (how.forward, how.backward))
    for made, left, right, errors in ((y, flat(x), flat(w).T, (fine, fine)),
                                      (dx, flat(g), flat(w), (coarse, fine)),
                                      (dw, flat(g).T, flat(x), (coarse, fine))):
        off = made.reshape(-1, right.shape[1]) - left @ right
        sizes = np.sqrt(np.square(left) @ np.square(right))
        bound = np.hypot(*errors) / np.sqrt(3)
        assert 0.1 * bound < np.sqrt(np.mean(np.square(off / sizes))) < bound


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_matmuls_are_of_rounded_operands(how: Fp8Linear):
    """Within what float32 sums lose: 2^-20 of the magnitudes that are added."""
    x, w, g = given()
    def numbers(a: np.ndarray, name: str, rows: int) -> np.ndarray:
        to, tensor = FORMATS[name], Tensor(np.ascontiguousarray(a, np.float32))
        made = by_block(tensor, to, rows, 128) if how.blocks else by_tensor(tensor, to)
        codes = numbers_of(made.codes, to.dtype).numpy().astype(np.float64)
        inverse = made.inverse.numpy().astype(np.float64)
        if how.blocks: inverse = np.repeat(np.repeat(inverse, rows, 0), 128, 1)[:a.shape[0], :a.shape[1]]
        return codes * inverse
    X, W, G = (flat(each) for each in (x, w, g))
    w_hat = numbers(W, how.forward, 128)
    pairs = ((numbers(X, how.forward, 1), w_hat.T), (numbers(G, how.backward, 1), w_hat),
             (numbers(G.T, how.backward, 1), numbers(X.T, how.forward, 1).T))
    for made, (left, right) in zip(found(how), pairs, strict=False):
        off = np.abs(made.reshape(-1, right.shape[1]) - left @ right)
        assert (off <= 2.0 ** -20 * (np.abs(left) @ np.abs(right))).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_meter_has_what_was_seen(how: Fp8Linear):
    x, w, g = given(dtypes.bfloat16)
    meter = derived(how, x, w, g)[3]
    np.testing.assert_array_equal(meter[:3], [np.abs(flat(each)).max() for each in (x, w, g)])
    np.testing.assert_array_equal(meter[3:6], 0)


def test_scales_that_are_given():
    """Those of steps before: values beyond are clamped, and counted by kind, under a captured step."""
    x, w, g = given()
    scales = [Tensor([value], dtype=dtypes.float32).realize() for value in (1.0, 448.0, 1e-9)]
    y, dx, _, meter = derived(HOWS[0], x, w, g, (scales[0], scales[1], scales[2]))
    assert meter[3:].tolist()[:3] == [0, int((np.abs(flat(w)) * 448 > 464).sum()), 0]
    assert meter[8] == g.numel(), "a gradient of 1e-9 is 0 in e5m2"
    assert not dx.any()
    run = TinyJit(lambda: fp8_linear(HOWS[0], x, w, None, Tensor.zeros(9).contiguous()).realize())
    for _ in range(3): found = run()
    np.testing.assert_array_equal(found.numpy(), derived(HOWS[0], x, w, g)[0].astype(np.float32))
    assert np.abs(y).max() > 0


def test_an_infinity_is_not_clamped():
    """It goes on as NaN, so that the step that has it is skipped."""
    x, w, g = given()
    wrong = g.numpy().copy()
    wrong[0, 0, 0] = np.inf
    _, dx, dw, _ = derived(HOWS[0], x, w, Tensor(wrong), tuple(Tensor([1.0]).realize() for _ in range(3)))
    assert np.isnan(dx[0, 0]).all()
    assert np.isnan(dw[0]).all()
    assert np.isfinite(dx[1:]).all()
