"""Safe norms and softmax: a search over rows that break plain ones, results and gradients, beside float64.

Errors are in units of u = 2^-24, with half a place of the result's dtype where that is narrower.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.numerics import safe_case as right
from tests.support.numerics.safe_case import TORCH, rows
from tinygrad_nv import disabled, explain
from tinygrad_nv.numerics.safe import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe

U = 2.0 ** -24
EPS = 1e-5
LENGTHS = [*[(n, dtypes.float32) for n in (1, 3, 65, 1024)], (65, dtypes.bfloat16), (65, dtypes.float16)]
MORE = [*[(n, dtypes.float32) for n in (2, 63, 512, 4097, 8192)],
        *[(n, dtype) for n in (3, 1024, 8192) for dtype in (dtypes.bfloat16, dtypes.float16)]]
Safe = Callable[[Tensor], Tensor]


def computed(safe: Safe, x: np.ndarray, g: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """The result, and x's gradient for g of it."""
    given = Tensor(x).cast(dtype).realize()
    out = safe(given)
    assert out.dtype == dtype
    gradient = (out.float() * Tensor(g)).sum().gradient(given)[0]
    return out.float().numpy().astype(np.float64), gradient.float().numpy().astype(np.float64)


def place(dtype: DType) -> float:
    """Half a unit in the last place of a narrower dtype, relative."""
    return 0.0 if dtype == dtypes.float32 else torch.finfo(TORCH[dtype]).eps / 2


def within(got: np.ndarray, want: np.ndarray, bound: np.ndarray | float, dtype: DType) -> None:
    """Errors of at most `bound`, beside half a place; what the dtype has no number for is infinite."""
    info = torch.finfo(TORCH[dtype])
    room = bound + place(dtype) * np.abs(want) * 1.01 + info.tiny * info.eps
    wrong = np.abs(got - want) > room
    assert not (wrong & (np.abs(want) < info.max)).any(), (np.abs(got - want) / room).max()
    assert not np.isnan(got).any()


def upstream(x: np.ndarray, dtype: DType = dtypes.float32) -> np.ndarray:
    """Gradients of a result, numbers of its dtype."""
    drawn = torch.from_numpy(np.random.default_rng(1).standard_normal(x.shape))
    return drawn.to(TORCH[dtype]).float().numpy()


def check_softmax(n: int, dtype: DType) -> None:
    x = rows(n, dtype, 0)
    g = upstream(x, dtype)
    got, gradient = computed(softmax_safe, x, g, dtype)
    within(got, right.softmax(x), 4 * U, dtype)
    within(gradient, right.softmax_gradient(x, g), 8 * U, dtype)


def check_logsumexp(n: int, dtype: DType) -> None:
    x = rows(n, dtype, 0)
    g = upstream(x[:, 0], dtype)
    got, gradient = computed(logsumexp_safe, x, g, dtype)
    want = right.logsumexp(x)
    within(got, want, 16 * U * (1 + np.abs(want)), dtype)
    within(gradient, right.softmax(x) * g[:, None], 32 * U, dtype)


def check_layernorm(n: int, dtype: DType) -> None:
    x = rows(n, dtype, 0)
    g = upstream(x, dtype)
    got, gradient = computed(lambda given: layernorm_safe(given, eps=EPS), x, g, dtype)
    want, steep = right.layernorm(x, EPS), 64 * U * np.sqrt(2 * n)
    within(got, want, steep, dtype)
    slope, size = right.layernorm_gradient(x, g, EPS)
    within(gradient, slope, steep * (1 + np.abs(want)) * size, dtype)


def check_rmsnorm(n: int, dtype: DType) -> None:
    x = rows(n, dtype, 0)
    g = upstream(x, dtype)
    got, gradient = computed(lambda given: rmsnorm_safe(given, eps=EPS), x, g, dtype)
    want = right.rmsnorm(x, EPS)
    within(got, want, 24 * U * np.abs(want), dtype)
    slope, size = right.rmsnorm_gradient(x, g, EPS)
    within(gradient, slope, 64 * U * (1 + np.abs(want)) * size, dtype)


CHECKS = [check_softmax, check_logsumexp, check_layernorm, check_rmsnorm]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("n", "dtype"), LENGTHS)
def test_rows_that_break_others(check: Callable[[int, DType], None], n: int, dtype: DType): check(n, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("n", "dtype"), MORE)
def test_more_lengths(check: Callable[[int, DType], None], n: int, dtype: DType): check(n, dtype)


@pytest.mark.slow
def test_rows_of_a_hundred_thousand():
    """Within the bounds of any order of sums."""
    n = 100_000
    x = rows(n, dtypes.float32, 0)
    for safe, want, bound in ((softmax_safe, right.softmax(x), (n + 8) * U),
                              (lambda x: layernorm_safe(x, eps=EPS), right.layernorm(x, EPS),
                               (n + 8) * U * np.sqrt(2 * n)),
                              (lambda x: rmsnorm_safe(x, eps=EPS), right.rmsnorm(x, EPS),
                               (n / 2 + 8) * U * np.abs(right.rmsnorm(x, EPS)))):
        within(safe(Tensor(x)).numpy(), want, bound, dtypes.float32)


# **** what is not finite ****

INF, NAN = np.inf, np.nan
SPECIAL = np.array([[-INF] * 4, [INF, 0, 1, -INF], [INF, INF, 3, 3], [NAN, 1, 2, 3], [NAN] * 4,
                    [-INF, 1, 1, 2], [NAN, INF, -INF, 0]], np.float32)


def test_softmax_of_infinities():
    got, gradient = computed(softmax_safe, SPECIAL, upstream(SPECIAL), dtypes.float32)
    np.testing.assert_allclose(got, right.softmax(SPECIAL), atol=4 * U)
    np.testing.assert_allclose(got[:3], [[0] * 4, [1, 0, 0, 0], [.5, .5, 0, 0]], atol=4 * U)
    number = [0, 1, 2, 5]
    want = right.softmax_gradient(SPECIAL[number], upstream(SPECIAL)[number])
    np.testing.assert_allclose(gradient[number], want, atol=8 * U)
    assert np.isnan(got[[3, 4, 6]]).all()
    assert np.isnan(gradient[[3, 4]]).all()
    assert np.isnan(gradient[6, [0, 2, 3]]).all()   # an infinity is cut off: its gradient is 0


def test_logsumexp_of_infinities():
    got, gradient = computed(logsumexp_safe, SPECIAL, np.ones(7, np.float32), dtypes.float32)
    np.testing.assert_allclose(got[[0, 1, 2, 5]], [-INF, INF, INF, np.log(2 * np.e + np.e ** 2)], rtol=4 * U)
    assert np.isnan(got[[3, 4, 6]]).all()
    assert (gradient[0] == 0).all()
    np.testing.assert_allclose(gradient[5], right.softmax(SPECIAL[5:6])[0], atol=8 * U)


def test_norms_of_infinities():
    for safe in (layernorm_safe, rmsnorm_safe):
        got, gradient = computed(safe, SPECIAL, upstream(SPECIAL), dtypes.float32)
        hidden = np.isnan(got).any(-1)
        assert hidden.all(), safe.__name__
        assert np.isnan(gradient).any(-1).all()
    got = rmsnorm_safe(Tensor(SPECIAL[1:2])).numpy()[0]
    assert (got[1:3] == 0).all()
    assert np.isnan(got[[0, 3]]).all()


@pytest.mark.slow
def test_weights_and_other_axes():
    rng = np.random.default_rng(2)
    x, w, b = rng.standard_normal((6, 40)), rng.standard_normal(40), rng.standard_normal(40)
    given, weight, bias = (Tensor(each.astype(np.float32)) for each in (x, w, b))
    want = right.layernorm(x, EPS) * w + b
    np.testing.assert_allclose(layernorm_safe(given, weight, bias).numpy(), want, atol=1e-5)
    want = right.rmsnorm(x, EPS) * w
    np.testing.assert_allclose(rmsnorm_safe(given, weight, EPS).numpy(), want, atol=1e-5)
    for safe in (softmax_safe, layernorm_safe, rmsnorm_safe):
        np.testing.assert_allclose(safe(given.T, axis=0).numpy(), safe(given).numpy().T, atol=1e-6)
    assert logsumexp_safe(given, axis=0, keepdim=True).shape == (1, 40)


# **** against the plain ones, and as kernels ****

def test_plain_ones_break():
    """What the search is for: each plain function is wrong for a row of it, whatever the order of its sums.
    (That of equal numbers is right where the sum happens to be rounded to that of the mean.)"""
    one = Tensor(np.full((1, 1000), 1234567.0, np.float32))
    assert (layernorm_safe(one).numpy() == 0).all()
    huge = Tensor(np.array([[1e25, -1e25] * 4], np.float32))
    assert (huge.layernorm().numpy() == 0).all()
    for safe in (layernorm_safe, rmsnorm_safe):
        np.testing.assert_allclose(safe(huge).numpy(), [[1, -1] * 4], rtol=16 * U)
    masked = Tensor(SPECIAL[:1])
    assert np.isnan(masked.softmax().numpy()).all()
    with disabled(): assert np.isnan(masked.logsumexp(-1).numpy()).all()


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16])
@pytest.mark.parametrize("safe", [softmax_safe, layernorm_safe, rmsnorm_safe, logsumexp_safe])
def test_one_norm_kernel_does_it(safe: Safe, dtype: DType):
    given = Tensor.empty(64, 512, dtype=dtype)
    assert [each.template for each in explain(safe(given)).kernels] == ["norm"]
