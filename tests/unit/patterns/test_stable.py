"""Derivatives of functions of 1 / (1 + 2^w) where 2^w is infinite, and as exact as before where it is not."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.patterns.stable import rewrite

F32, F16 = dtypes.float32, dtypes.float16
# a row of our kernels has 64 elements; 2^w is infinite at -90 (sigmoid), -50 (tanh), -60 (1.702 x)
X = np.concatenate([[-np.inf, -1e4, -90, -60, -50, -30], np.linspace(-17, 17, 100), [30, 90, 1e4]])
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": Tensor.sigmoid, "tanh": Tensor.tanh, "silu": Tensor.silu, "quick_gelu": Tensor.quick_gelu,
    "1 / (1 + exp)": lambda x: 1 / (1 + (-x).exp()), "log(1 + exp)": lambda x: (1 + (-x).exp()).log(),
    "exp / (1 + exp)": lambda x: x.exp() / (1 + x.exp())}


def logistic(x: np.ndarray) -> np.ndarray: return 1 / (1 + np.exp(-x.clip(-700)))


def slope(x: np.ndarray) -> np.ndarray: return logistic(x) * logistic(-x)


# y (1 - y), as float64 references have it, is no better than 1e-16 / y
EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": lambda x: 4 * slope(2 * x), "silu": lambda x: logistic(x) + x * slope(x),
    "quick_gelu": lambda x: logistic(1.702 * x) + 1.702 * x * slope(1.702 * x),
    "log(1 + exp)": lambda x: -logistic(-x)}
pytestmark = pytest.mark.usefixtures("cpu_device")


# up to 12 roundings, and that of w, of which 2^w has |w| times as much. Terms of silu cancel where it turns,
# at x = -1.28; exp / (1 + exp) is a difference that rounds to 0
@pytest.mark.sampled(7)
@pytest.mark.parametrize(("dtype", "unit", "least"), [(F32, 2.0**-24, 2.0**-126), (F16, 2.0**-11, 2.0**-14)],
                         ids=["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_exact_wherever_they_are_finite(name: str, dtype: DType, unit: float, least: float):
    x = Tensor(X[1:]).cast(dtype).contiguous().realize()
    (made,) = CASES[name](x).sum().gradient(x)
    wide = x.numpy().astype(np.float64)
    exact = EXACT.get(name, slope)(wide)
    terms = np.abs(exact) + (1.0 if name == "exp / (1 + exp)" else np.exp(-2 * np.abs(wide)))
    # numbers below `least` are subnormal
    bound = (12 + 3 * np.abs(wide).clip(0, 90)) * unit * terms + (1 + np.abs(wide)) * least
    off = np.abs(made.numpy().astype(np.float64) - exact)
    assert (off <= bound).all(), f"x = {wide[~(off <= bound)]}: {made.numpy()[~(off <= bound)]}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "1 / (1 + exp)"])
def test_values_that_are_kept_for_the_backward_pass(name: str):
    """1 / (1 + e) is in memory, e is not; the same in a kernel of tinygrad's own, of 9 elements."""
    for x in (Tensor(X).cast(F32).realize(), Tensor(X[:9]).cast(F32).realize()):
        y = CASES[name](x)
        (made,) = y.sum().gradient(x)
        Tensor.realize(y, made)
        assert np.isfinite(made.numpy()).all()


def test_second_derivatives():
    x = Tensor(X[1:]).cast(F32).realize()
    (first,) = x.sigmoid().sum().gradient(x)
    (second,) = first.sum().gradient(x)
    wide = x.numpy().astype(np.float64)
    assert np.abs(second.numpy() - slope(wide) * (1 - 2 * logistic(wide))).max() < 1e-6


def test_behind_a_matmul():
    """The epilogue of a backward matmul, and rows of 72."""
    x, w, v = (Tensor(np.random.default_rng(i).standard_normal(shape) * scale).cast(F32).realize()
               for i, (shape, scale) in enumerate([((3, 72), 100), ((72, 72), 1), ((72, 72), 1)]))
    for act in (Tensor.sigmoid, Tensor.silu, Tensor.tanh):
        y = act(x @ w).contiguous()
        made = (y @ v).square().sum().gradient(x, w, v)
        Tensor.realize(y, *made)
        assert all(np.isfinite(each.numpy()).all() for each in made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a matmul"])
def test_numbers_come_last(behind: bool):
    """The derivative of mish has 2 x among its factors: float16 does not reach it at x = 6e4, beside a 0."""
    x = Tensor(np.array([[-6e4, -1.0, 1.0, 6e4] * 4])).cast(F16).contiguous().realize()
    one = Tensor(np.eye(16)).cast(F16).contiguous().realize()
    (made,) = (x @ one if behind else x).mish().sum().gradient(x)
    assert np.allclose(made.numpy()[0], [0.0, 0.059217, 1.049036, 1.0] * 4, atol=2e-3)


def test_forward_passes_stay_as_they_are():
    x = Tensor.empty(4, 72)
    for y in (x.silu(), x.tanh() * x, x.sigmoid().log(), x.softmax(), x.exp() * (2 + x.exp()).reciprocal()):
        sink = y.uop.sink()
        assert rewrite(sink) is sink


def test_a_quotient_of_a_narrower_dtype():
    """1 / (1 + e) in float16, which e, of float32, exceeds from x = -11.1 down."""
    x = Tensor(X[1:]).cast(F32).realize()
    (made,) = (1 / (1 + (-x).exp()).half()).float().sum().gradient(x)
    wide = x.numpy().astype(np.float64)
    inside = np.abs(wide) < 9   # where float16 has 1 + e, and d²
    assert np.isfinite(made.numpy()).all()
    # 1 + e, d, d · d and the sums of casts, each rounded to 11 bits
    off = np.abs(made.numpy() - slope(wide))[inside]
    assert (off <= 8 * 2.0**-11 * slope(wide)[inside] + 2.0**-14).all()


def test_numbers_without_a_dtype():
    for x in (Tensor(-2.0), Tensor(-2), Tensor.full((3,), -2.0, buffer=False)):
        e = x.exp()
        assert np.allclose((e * (1 + e).reciprocal()).numpy(), 0.1192029, atol=1e-6)
    e = Tensor(1000.0).exp()
    assert (e * (1 + e).reciprocal()).item() == 1


def test_integers_have_no_factors():
    """int(e) int(d) is 0 wherever d is less than 1; int(e d) is 1 where e is large."""
    x = Tensor([0.0, 3, 21]).realize()
    e = x.exp()
    assert (e.int() * (1 + e).reciprocal().int()).tolist() == [0, 0, 0]
