"""Safe norms and softmax: a search over rows that break plain ones, results and gradients, beside
float64. Bounds from graphs hold for what is computed, and are narrow where it matters; and the decorator.

Errors are in units of u = 2^-24, with half a place of the result's dtype where that is narrower.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import Context

from tests.support.numerics import safe_case as right
from tests.support.numerics.safe_case import TORCH, rows
from tinygrad_nv import config, disabled, explain
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.safe import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe
from tinygrad_nv.numerics.verify import interval, numerics
from tinygrad_nv.numerics.verify.bounds import check

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


Function = Callable[[Tensor], Tensor]
X = Tensor.empty(4, 8)
# function, bounds for x in -2 … 3
KNOWN: dict[str, tuple[Function, float, float]] = {
    "softmax_safe": (softmax_safe, 0, 1), "safe columns": (lambda x: softmax_safe(x, 0), 0, 1),
    "softmax": (Tensor.softmax, 0, 1), "softmax of columns": (lambda x: x.softmax(0), 0, 1),
    "sigmoid": (Tensor.sigmoid, 0.119203, 0.952574), "tanh": (Tensor.tanh, -0.964027, 0.995055),
    "clip": (lambda x: x.clip(-1, 2), -1, 2), "relu": (Tensor.relu, 0, 3), "square": (lambda x: x * x, 0, 9),
    "exp": (Tensor.exp, math.exp(-2), math.exp(3)), "sum": (lambda x: x.sum(), -64, 96),
    "mean": (lambda x: x.mean(), -2, 3), "max": (lambda x: x.max(1), -2, 3), "abs": (Tensor.abs, 0, 3),
    "matmul": (lambda x: x @ x.T, -48, 72), "pad": (lambda x: x.abs().pad((1, 1)), 0, 3),
    "distance": (lambda x: x - x.max(1, keepdim=True), -math.inf, 0), "sin": (Tensor.sin, -1, 1),
    "bf16": (lambda x: x.cast(dtypes.bfloat16), -2, 3), "where": (lambda x: (x < 1).where(x, 7.0), -2, 7),
    "log": (lambda x: (x.square() + 1).log(), 0, math.log(10))}


@pytest.mark.parametrize("name", KNOWN)
def test_known_bounds(name: str):
    function, least, most = KNOWN[name]
    found = interval(function(X), {X: (-2, 3)})
    slack = 0.04 if name == "bf16" else 1e-4
    assert not found.nan
    assert found.least == least or least - slack * abs(least) - 1e-6 <= found.least <= least
    assert found.most == most or most <= found.most <= most + slack * abs(most) + 1e-6


UNARY: list[Function] = [
    Tensor.exp, Tensor.log, Tensor.sqrt, Tensor.sin, Tensor.relu, Tensor.sigmoid, Tensor.tanh, Tensor.square,
    Tensor.reciprocal, Tensor.neg, Tensor.abs, Tensor.trunc, Tensor.softmax, lambda x: x.softmax(0),
    lambda x: x.sum(1, keepdim=True) + x, lambda x: x.max(0, keepdim=True) - x, lambda x: x - x.max().item(),
    lambda x: x.cast(dtypes.float16).float(), lambda x: x.cast(dtypes.int32).float(),
    softmax_safe, lambda x: softmax_safe(x, 0),
    lambda x: x.T.reshape(4, 8), lambda x: (x > 0).where(x * 3, x / 7),
    lambda x: x.clip(-1, 1) @ Tensor.ones(8, 8), lambda x: x.pad((1, 0)),
    lambda x: x - x.max(1).reshape(1, 4).pad(((0, 0), (0, x.shape[1] - 4))), Tensor.layernorm]


def values_of(seed: int, scale: float) -> Tensor:
    return Tensor((np.random.default_rng(seed).standard_normal((4, 8)) * scale).astype(np.float32)).realize()


@drawn(st.lists(st.sampled_from(UNARY), min_size=1, max_size=4), st.integers(0, 99),
       st.sampled_from((1e-3, 1.0, 30.0, 1e30)))
@settings(deadline=None, max_examples=6)
def test_bounds_hold(functions: list[Function], seed: int, scale: float): hold(functions, seed, scale)


@pytest.mark.slow
@drawn(st.lists(st.sampled_from(UNARY), min_size=1, max_size=6), st.integers(0, 999),
       st.sampled_from((1e-30, 1e-3, 1.0, 30.0, 1e30)))
@settings(deadline=None, max_examples=200)
def test_bounds_hold_of_more(functions: list[Function], seed: int, scale: float): hold(functions, seed, scale)


def hold(functions: list[Function], seed: int, scale: float) -> None:
    """Of a chain of operations, for random operands."""
    x = values_of(seed, scale)
    out = x
    for function in functions:
        if out.shape == x.shape or function in UNARY[:13]: out = function(out)
    found = interval(out)
    with np.errstate(all="ignore"): got = out.numpy().astype(np.float64)
    numbers = got[~np.isnan(got)]
    assert found.nan or len(numbers) == got.size
    assert (numbers >= found.least).all(), (found, numbers.min())
    assert (numbers <= found.most).all(), (found, numbers.max())


def test_rows_that_are_not_the_ones_taken_off():
    """The largest of columns, laid out as if it were that of rows: above 0 is possible."""
    x = Tensor.empty(8, 8)
    assert interval(x - x.max(0).reshape(8, 1)).most > 0
    assert interval(x - x.max(1).reshape(8, 1)).most == 0
    exps = x.exp()
    assert interval(exps * exps.sum(0).reshape(8, 1).reciprocal()).most > 1.1


@pytest.mark.parametrize(("function", "nan"), [
    (Tensor.log, True), (lambda x: x.square().log(), False), (Tensor.sqrt, True),
    (lambda x: x.exp() - x.exp(), True), (lambda x: x.square().sqrt(), False), (lambda x: x * 0.5, False)])
def test_where_nan_can_be(function: Function, nan: bool):
    assert interval(function(X)).nan is nan


# **** the decorator ****

@numerics(stable=True, bounded=[-100, 100])
def attention_score(q: Tensor, k: Tensor) -> Tensor: return q @ k.T


def test_nothing_is_checked_without_debug():
    big = values_of(0, 1e6)
    assert np.isfinite(attention_score(big, big).numpy()).all()
    assert str(attention_score.numerics) == "numbers of -100 … 100"  # type: ignore[attr-defined]


def test_a_result_in_its_range_and_one_beyond(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")
    assert config.get("NV_DEBUG") == 1
    attention_score(values_of(0, 1.0), values_of(1, 1.0))
    big = values_of(0, 10.0)
    with pytest.raises(NumericsError, match=r"(?s)attention_score has elements of .*numbers of -100 … 100"):
        attention_score(big, big)
    broken = Tensor([[math.nan] * 8])
    with pytest.raises(NumericsError, match="attention_score has 1 of 1 elements that are NaN"):
        attention_score(broken, broken)


def test_what_is_proved_does_not_run():
    x = Tensor.empty(4, 8)
    with Context(DEBUG=0):
        assert check(attention_score.numerics, "share", x.softmax())  # type: ignore[attr-defined]
        assert not check(attention_score.numerics, "x", values_of(0, 1.0) * 2)  # type: ignore[attr-defined]
    assert not x.uop.base.buffer.is_allocated()


def test_results_in_tuples_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")

    @numerics(bounded=(0, 1))
    def two(x: Tensor) -> dict[str, list[Tensor]]: return {"shares": [x.softmax(), x * 5]}
    with pytest.raises(NumericsError, match=r"two\['shares'\]\[1\] has elements"): two(values_of(0, 1.0))


def test_captured_functions_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")
    step = TinyJit(lambda x: attention_score(x, x).realize())
    for i in range(4): assert np.isfinite(step(values_of(i, 1.0)).numpy()).all()


@pytest.mark.parametrize("bounded", [[1], [3, 2], [1, 2, 3], [math.nan, 1]])
def test_ranges_that_are_none(bounded: list[float]):
    with pytest.raises(NumericsError, match=r"(?s)bounded=\[.*the least and the largest number"):
        numerics(bounded=bounded)


def test_what_only_looks_like_a_safe_softmax_is_not_bounded():
    """Shifted by another row's largest, guarded by another total, or a row of which none was taken off."""
    x, y = Tensor.empty(4, 8), Tensor.empty(4, 8)
    inf, largest = math.inf, 3.4028234663852886e38
    def shifted(of: Tensor) -> Tensor:
        top = of.max(1, keepdim=True)
        top = (top == inf).where(largest, (top == -inf).where(0.0, top))
        return (x == inf).where(largest, x) - top
    assert interval(shifted(x)).most == 0
    assert interval(shifted(y)).most == inf
    def share(e: Tensor, of: Tensor) -> Tensor:
        total = of.sum(1, keepdim=True)
        return e * (total == 0).where(1, total).reciprocal()
    e, other = shifted(x).exp(), shifted(y).exp()
    assert interval(share(e, e)).within(0, 1 + 1e-6)
    assert not interval(share(e, other)).within(0, 1 + 1e-6)
    assert not interval(share(x.exp(), x.exp())).within(0, 2)       # inf / inf
