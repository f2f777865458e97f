"""Kernels in the tile language that benchmarks time compute what they say, on the CPU, and as PTX on the
emulated GPU."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from bench.lib import kernels_language as kernels
from tinygrad_nv.tile.language.schedule import TileSchedule

SCHEDULE = TileSchedule(block=(16, 32), k=32, warps=4, stages=3)
GROUP = 32


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_norms() -> None:
    x, w, b = numbers(10, 96), numbers(96, seed=1), numbers(96, seed=2)
    rows, weight, bias = (torch.from_numpy(each).double() for each in (x, w, b))
    given = [Tensor(each) for each in (x, w, b)]
    rms, layer = (kernel.with_schedule(SCHEDULE) for kernel in (kernels.rms_norm, kernels.layer_norm))
    want = torch.nn.functional.rms_norm(rows, (96,), weight, 1e-5).numpy()
    np.testing.assert_allclose(rms(given[0], given[1], eps=1e-5).numpy(), want, atol=2e-6)
    want = torch.nn.functional.layer_norm(rows, (96,), weight, bias, 1e-5).numpy()
    np.testing.assert_allclose(layer(*given, eps=1e-5).numpy(), want, atol=2e-6)
    made = kernels.softmax.with_schedule(SCHEDULE)(given[0]).numpy()
    np.testing.assert_allclose(made, rows.softmax(1).numpy(), atol=1e-6)


def quantised(m: int, n: int, k: int) -> tuple[list[Tensor], np.ndarray[Any, Any]]:
    """x, words and scales; what they stand for, multiplied exactly: all are small integers."""
    random = np.random.default_rng(3)
    codes, x = random.integers(0, 16, (n, k)), random.integers(-3, 4, (m, k))
    scales = random.integers(1, 4, (k // GROUP, n))
    places = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], np.uint32)
    words = (codes.reshape(n, -1, 8).astype(np.uint32) << places).sum(2)
    given = [Tensor(x).cast(dtypes.float16), Tensor(words.astype(np.uint32).view(np.int32)),
             Tensor(scales).cast(dtypes.float16)]
    return [each.realize() for each in given], x @ ((codes - 8) * np.repeat(scales, GROUP, 0).T).T


@pytest.mark.parametrize("arch", ["", "sm_80", "sm_90a"])
def test_4_bit_weights(arch: str) -> None:
    given, want = quantised(20, 64, 128)
    assert np.abs(want).max() < 2048        # integers that float16 has
    plain, split = (kernel.with_schedule(SCHEDULE) for kernel in (kernels.w4a16, kernels.w4a16_split))
    for kernel, more in ((plain, {}), (split, {"split": 2})):
        if arch:
            checked = kernel.check(*given, arch=arch, group=GROUP, **more)
            assert not checked.findings, str(checked)
            made, = checked.outputs.values()
        else: made = kernel(*given, group=GROUP, **more).numpy()
        np.testing.assert_array_equal(made, want)


def test_matmul_with_a_transposed_matrix() -> None:
    a, b = numbers(40, 70).round(), numbers(30, 70, seed=1).round()
    made = kernels.matmul_nt.with_schedule(SCHEDULE)(Tensor(a), Tensor(b))
    np.testing.assert_array_equal(made.numpy(), a @ b.T)
