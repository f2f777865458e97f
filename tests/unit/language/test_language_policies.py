"""What policies of dtypes say is what stores and sums of kernels do."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor as Plain
from tinygrad import dtypes

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.language import *

N = 4096


@kernel(grid=lambda N: (cdiv(N, 256),))
def rounded_up_or_down(x: KTile["N", f32], out: OTile["N", bf16 @stochastic_round(seed=7)]):
    rows = tile.block(tile.program_id(0) * 256, 256)
    out[rows] = x[rows]


@kernel(grid=lambda N: (cdiv(N, 256),))
def clamped(x: KTile["N", f32], out: OTile["N", f16 @saturate]):
    rows = tile.block(tile.program_id(0) * 256, 256)
    out[rows] = x[rows]


@kernel
def narrow_sums(a: KTile["M", "K", f16 @accum(f16)], b: KTile["K", "N", f16]) -> OTile["M", "N", f32]:
    T = tile.context()
    return tile.dot(a[T.m, :], b[:, T.n])


@kernel(grid=lambda N: (cdiv(N, 256),))
def summed(x: KTile["N", f32], out: OTile["1", f32 @deterministic]):
    tile.atomic_add(out, tile.sum(x[tile.block(tile.program_id(0) * 256, 256)]), 0)


def test_stochastic_round() -> None:
    """Each number becomes one of its two neighbours, as often as it is near; the same ones at each call."""
    step, start = 2.0**-7, 1.0
    share = np.linspace(0, 1, N, endpoint=False)
    x = Plain((start + share * step).astype(np.float32))
    made = rounded_up_or_down(x).float().numpy()
    assert set(np.unique(made)) <= {np.float32(start), np.float32(start + step)}
    up = made > start
    for low in np.arange(0, 1, 0.125):
        part = up[(share >= low) & (share < low + 0.125)]
        assert abs(part.mean() - (low + 0.0625)) < 4 * np.sqrt(0.25 / part.size)
    np.testing.assert_array_equal(made, rounded_up_or_down(x).float().numpy())
    exact = Plain(np.array([np.inf, -np.inf, 0.0, 1.0, -2.0], np.float32))
    np.testing.assert_array_equal(rounded_up_or_down(exact).float().numpy(), exact.numpy())
    assert np.isnan(rounded_up_or_down(Plain([float("nan")])).float().numpy()).all()


def test_saturate() -> None:
    x = Plain(np.array([1e6, -1e6, np.inf, -np.inf, 3.0, np.nan], np.float32))
    np.testing.assert_array_equal(clamped(x).float().numpy(),
                                  np.array([65504, -65504, 65504, -65504, 3, np.nan], np.float32))


def test_the_same_on_the_emulator() -> None:
    x = Plain(np.random.default_rng(0).standard_normal(600).astype(np.float32)).realize()
    for one in (rounded_up_or_down, clamped):
        checked = one.check(x, arch="sm_80")
        assert not checked.findings
        np.testing.assert_array_equal(checked.outputs["out"], one(x).float().numpy())


def test_sums_that_are_not_kept() -> None:
    a = Plain.ones(8, 8, dtype=dtypes.float16)
    with pytest.raises(NumericsError, match=r"narrow_sums \(.*\): a: .*accum\(f16\)"): narrow_sums(a, a)


def test_sums_in_any_order() -> None:
    with pytest.raises(NumericsError, match="atomic_add of floats in kernel summed, which is deterministic"):
        summed(Plain.ones(1000))


@kernel
def dequantised(x: KTile["M", "K", f32], w: QTile["K", "N", int8], scale: KTile["N", f32]) -> OTile["M", "N",
                                                                                                    f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(x.shape, T.k):
        acc = tile.dot_dequant_i8(x[T.m, k], tile.load_qint8(w, k, T.n, scale=scale[T.n]), acc=acc)
    return acc


def test_int8_codes() -> None:
    """Small integers: exact."""
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-4, 5, shape) for shape in ((30, 100), (100, 50)))
    scale = 2.0 ** rng.integers(-3, 3, 50)
    made = dequantised(*(Plain(each.astype(kind)) for each, kind in
                         ((x, np.float32), (w, np.int8), (scale, np.float32))))
    np.testing.assert_array_equal(made.numpy(), x @ w * scale)
