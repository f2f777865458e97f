"""Bounds from graphs hold for what is computed, and are narrow where it matters; and the decorator."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context

from tinygrad_nv import config
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.safe import softmax_safe
from tinygrad_nv.numerics.verify import interval, numerics
from tinygrad_nv.numerics.verify.bounds import check

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
