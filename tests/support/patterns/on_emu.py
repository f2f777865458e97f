"""Helpers of the tests that run tinygrad on DEV=EMU."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tinygrad.helpers import Context

from tinygrad_nv import Device, Tensor

RNG_SEED = 7


@pytest.fixture(autouse=True)
def emu() -> Iterator[None]:
    """Every test of a module that imports this runs on EMU, and ends with no finding left."""
    with Context(DEV="EMU"):
        yield
        Device["EMU"].synchronize()


def rng() -> np.random.Generator: return np.random.default_rng(RNG_SEED)


def floats(*shape: int) -> np.ndarray: return rng().standard_normal(shape).astype(np.float32)


def equal(found: Tensor, wanted: np.ndarray) -> None:
    """Bit for bit, in shape too."""
    np.testing.assert_array_equal(found.numpy(), wanted, strict=False)
    assert found.shape == wanted.shape


def near(found: Tensor, wanted: np.ndarray, error: float) -> None:
    """|found - wanted| ≤ error * (1 + |wanted|), `wanted` in float64."""
    wanted = np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    off = np.abs(found.float().numpy().astype(np.float64) - wanted) / (1 + np.abs(wanted))
    assert off.max(initial=0) <= error, f"{off.max():.3g} > {error:.3g}"
