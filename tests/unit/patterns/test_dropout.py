"""Dropout from a counter: what is dropped, how often, its gradient, and what of it is kept."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context, GlobalCounters

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import dropout


def number(value: int) -> Tensor: return Tensor([value], dtype=dtypes.uint32).realize()


def words(count: int, salt: int, of: int) -> np.ndarray:
    """The hashes, by NumPy."""
    h = np.arange(count, dtype=np.uint64) * 0x9E3779B1 + salt * 0x85EBCA77
    h = (h ^ (of * 0xC2B2AE3D & 0xFFFFFFFF)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)): h = (h ^ (h >> shift)) * factor & 0xFFFFFFFF
    return h ^ (h >> 16)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.999])
def test_elements(p: float) -> None:
    """Those of the hash; 16384 draws: 5 standard deviations of the share."""
    x = Tensor.ones(64, 256)
    with Context(TRAINING=1): found = dropout(x, p, number(9), salt=5).numpy().reshape(-1)
    kept = words(found.size, 5, 9) >= int(p * 2**32)
    np.testing.assert_array_equal(found != 0, kept)
    np.testing.assert_allclose(found[kept], 1 / (1 - p), rtol=2.0**-23)
    assert abs((~kept).mean() - p) < 5 * (p * (1 - p) / found.size) ** 0.5


def test_numbers_are_independent() -> None:
    x = Tensor.ones(64, 256)
    def of(value: int, salt: int = 0) -> np.ndarray:
        with Context(TRAINING=1): return dropout(x, 0.25, number(value), salt).numpy()
    one = of(1)
    np.testing.assert_array_equal(one, of(1))
    for other in (of(2), of(1, salt=1)):
        assert abs((one == other).mean() - (0.75**2 + 0.25**2)) < 0.02


def test_gradient_and_what_is_kept() -> None:
    """That of the elements that stay, in one kernel, which reads no mask: the bytes of two gradients."""
    x = (Tensor.rand(256, 1024) + 1).contiguous().realize()     # where y is 0, an element was dropped
    grad, which = Tensor.randn(256, 1024).contiguous().realize(), number(3)
    with Context(TRAINING=1):
        y = dropout(x, 0.5, which)
        made, = y.gradient(x, gradient=grad)
        y.realize()
        GlobalCounters.reset()
        made.realize()
    assert GlobalCounters.kernel_count == 1
    assert GlobalCounters.global_mem <= 2 * grad.nbytes() + 64
    np.testing.assert_array_equal(made.numpy(), np.where(y.numpy() != 0, 2 * grad.numpy(), 0))


def test_a_captured_step_draws_by_its_number() -> None:
    x, which = Tensor.ones(1000).contiguous().realize(), number(0)
    def step() -> Tensor:
        with Context(TRAINING=1): return dropout(x, 0.5, which).contiguous().realize()
    run, made = TinyJit(step), []
    for value in range(4):
        which.assign(number(value)).realize()
        made.append(run().numpy().copy())
    for value, found in enumerate(made):
        np.testing.assert_array_equal(found != 0, words(1000, 0, value) >= 2**31)


def test_outside_of_training() -> None:
    x = Tensor.ones(4)
    assert dropout(x, 0.5, number(0)) is x
    with Context(TRAINING=1): assert dropout(x, 0.0, number(0)) is x


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match="p=1"): dropout(Tensor.ones(2), 1.0, number(0))
    with pytest.raises(SpecError, match=r"(?s)number of int \(1,\).*uint32"):
        dropout(Tensor.ones(2), 0.1, Tensor([1]))
