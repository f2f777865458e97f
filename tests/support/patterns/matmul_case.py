"""Helpers of the tests that send matmuls of tinygrad's graph to the templates on DEV=EMU.

Protocol: `whole(...)` gives integers that every dtype here holds exactly, as are their sums of products, so
results must be equal to numpy's in float64, rounded once. `taken(y)` gives the specs of the kernels that
`y.realize()` would run and are ours.
"""
from __future__ import annotations

import numpy as np
from tinygrad.dtype import DType

from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.tile.gemm.spec import GemmSpec

BF16 = dtypes.bfloat16
ROWS = ("norm", "elements")  # templates of what is no product


def whole(*shape: int, seed: int = 0, most: int = 3) -> np.ndarray:
    """Integers up to `most` in size, in float64."""
    return np.random.default_rng((seed, *shape)).integers(-most, most + 1, shape).astype(np.float64)


def stored(values: np.ndarray, dtype: DType = BF16) -> Tensor:
    """A tensor in memory."""
    return Tensor(values.astype(np.float32)).cast(dtype).contiguous().realize()


def rounded(values: np.ndarray, dtype: DType = BF16) -> np.ndarray:
    """Values as the dtype holds them."""
    return np.asarray(stored(np.asarray(values), dtype).float().numpy(), np.float64)


def taken(*tensors: Tensor) -> list[GemmSpec]:
    """Specs of the kernels of ours, but those of rows."""
    specs = [kernel.spec for kernel in explain(*tensors).kernels if kernel.template not in (None, *ROWS)]
    assert all(isinstance(spec, GemmSpec) for spec in specs)
    return specs


def extents(spec: GemmSpec) -> tuple[int, ...]: return (*spec.batch, spec.m, spec.n, spec.k)


def check(y: Tensor, wanted: np.ndarray, *specs: tuple[int, ...],
          kernels: int | None = None) -> list[GemmSpec]:
    """Asserts that products of these extents (batch, M, N, K) make `y`, in so many kernels, and its value."""
    found = taken(y)
    assert [extents(spec) for spec in found] == list(specs)
    assert len(explain(y).kernels) == (len(specs) if kernels is None else kernels)
    np.testing.assert_array_equal(y.float().numpy(), rounded(wanted, y.dtype))
    assert y.shape == wanted.shape
    return found
