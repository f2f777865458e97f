"""Elementary functions against numpy in more digits: near 0, far from it, at infinity and NaN."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from tinygrad_nv import elementary

EXACT: dict[str, Callable[[Any], Any]] = {
    "log1p": np.log1p, "expm1": np.expm1, "softplus": lambda x: np.logaddexp(0, x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "atan": np.arctan, "asin": np.arcsin, "acos": np.arccos}
UNITS = 4       # in the last place; tinygrad's exp has as many near 20, and more beyond


def points(dtype: type[np.floating[Any]]) -> np.ndarray:
    random = np.random.default_rng(0)
    made = np.concatenate([10.0 ** np.linspace(-30, 1.2, 200), random.uniform(0, 4, 500),
                           [0.0, np.inf, np.nan, 1e20, 1.0, 0.5]])
    return np.concatenate([made, -made]).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_digits(dtype: type[np.floating[Any]]):
    x = points(dtype)
    with Context(DEV="CPU"):
        given = Tensor(x, dtype=dtypes.float64 if dtype is np.float64 else dtypes.float32)
        found = {name: getattr(elementary, name)(given) for name in EXACT}
        Tensor.realize(*found.values())
    for name, exact in EXACT.items():
        with np.errstate(all="ignore"): wanted = exact(x.astype(np.longdouble))
        made, rounded = found[name].numpy(), wanted.astype(dtype)
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(made[~finite], rounded[~finite], err_msg=name)
        scale = np.maximum(np.abs(wanted[finite]), np.finfo(dtype).tiny) * np.finfo(dtype).eps
        # exp(x) of x = y log 2 is off by units of y, some of them
        allowed = UNITS + (4 * np.abs(x[finite]) if name in ("expm1", "softplus", "sinh", "cosh") else 0)
        off = np.abs(made[finite] - wanted[finite]) / scale
        assert (off <= allowed).all(), (name, x[finite][np.argmax(off - allowed)])


def test_erf():
    x = points(np.float32)
    x = x[~np.isnan(x)]
    with Context(DEV="CPU"): single = elementary.erf(Tensor(x)).numpy()
    np.testing.assert_allclose(single, list(map(math.erf, x)), rtol=5 * 2.0 ** -23)
    # the series of float64 is long: compiling it takes longer than a few numbers without a compiler
    few = [-6.5, -3.3, -0.7, 1e-9, 0.2, 2.1, 5.5]
    with Context(DEV="PYTHON"): double = elementary.erf(Tensor(few, dtype=dtypes.float64)).tolist()
    np.testing.assert_allclose(double, list(map(math.erf, few)), rtol=12 * 2.0 ** -52)


def test_nan_of_two_operands():
    x, y = (np.array(each, np.float32) for each in ([np.nan, 1, 2, np.nan], [1, np.nan, 1, np.nan]))
    with Context(DEV="CPU"):
        a, b = Tensor(x), Tensor(y)
        np.testing.assert_array_equal(elementary.maximum(a, b).numpy(), np.maximum(x, y))
        np.testing.assert_array_equal(elementary.minimum(a, b).numpy(), np.minimum(x, y))
        np.testing.assert_array_equal(elementary.at_most(a, b).numpy(), x <= y)
