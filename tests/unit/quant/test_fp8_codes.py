"""8-bit codes of training: torch's bits, Transformer Engine's scales, and what the rounding lost."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.quant.fp8 import E4M3, E5M2, FLOAT32_MOST, Format, bits_of, by_block, by_tensor, scale_of
from tinygrad_nv.quant.tensor import numbers_of

THEIRS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = pytest.mark.parametrize("to", [E4M3, E5M2], ids=lambda each: each.name)


def wanted(x: np.ndarray, to: Format) -> np.ndarray:
    """torch's codes of numbers that are clamped before, as torch does not clamp."""
    return torch.tensor(x).clamp(-to.most, to.most).to(THEIRS[to.name]).view(torch.uint8).numpy()


def scale(amax: np.ndarray, most: float, power_of_two: bool) -> np.ndarray:
    """compute_scale_from_amax of transformer_engine/common/recipe/recipe_common.cuh, in NumPy."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        made = np.float32(most) / amax.astype(np.float32)
    made = np.where(np.isinf(made), np.float32(FLOAT32_MOST), made).astype(np.float32)
    if power_of_two: made = (made.view(np.uint32) & 0xFF800000).view(np.float32)
    return np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), made)


@FORMATS
def test_bits_are_those_of_torch(to: Format):
    """Of all sizes, of every number of the format and the ties between them, of zeros of both signs."""
    random = np.random.default_rng(0)
    drawn = random.standard_normal(20000) * 2.0 ** random.integers(-30, 30, 20000)
    every = numbers_of(Tensor(np.arange(256, dtype=np.uint8)), to.dtype).numpy()
    every = np.sort(every[np.isfinite(every)])
    ties = (every[1:] + every[:-1]) / 2
    x = np.concatenate([drawn, every, ties, np.nextafter(ties, 9e9), [-0.0, 1e38]]).astype(np.float32)
    np.testing.assert_array_equal(bits_of(Tensor(x), to).numpy(), wanted(x, to))


@FORMATS
def test_what_is_not_finite_is_nan(to: Format):
    codes = bits_of(Tensor(np.array([np.inf, -np.inf, np.nan], np.float32)), to)
    assert np.isnan(torch.tensor(codes.numpy()).view(THEIRS[to.name]).float().numpy()).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@FORMATS
def test_scales_are_those_of_transformer_engine(to: Format, power_of_two: bool):
    random = np.random.default_rng(1)
    amax = np.abs(random.standard_normal(500) * 10.0 ** random.integers(-30, 30, 500)).astype(np.float32)
    amax = np.concatenate([amax, [0, np.inf, np.nan, 1e-38, 448, 57344]]).astype(np.float32)
    found = scale_of(Tensor(amax), to.most, power_of_two).numpy()
    np.testing.assert_array_equal(found, scale(amax, to.most, power_of_two))


@pytest.mark.sampled(1)
@FORMATS
def test_a_tensor(to: Format):
    x = (np.random.default_rng(2).standard_normal((7, 33)) * 3).astype(np.float32)
    made = by_tensor(Tensor(x), to)
    own = scale(np.abs(x).max(), to.most, False)
    np.testing.assert_array_equal(made.codes.numpy(), wanted(x * own, to))
    np.testing.assert_array_equal(made.inverse.numpy(), [np.float32(1) / own])
    assert made.lost.numpy()[:2].tolist() == [np.abs(x).max(), 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 128])
def test_blocks(rows: int):
    """Of 1 x 128 and 128 x 128, cut off at both ends."""
    x = np.random.default_rng(3).standard_normal((200, 300)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(4).integers(-3, 3, (200, 1))
    made = by_block(Tensor(x), E4M3, rows, 128)
    assert made.inverse.shape == (-(-200 // rows), 3)
    for i in range(0, 200, rows):
        for j in range(3):
            block = x[i:i + rows, 128 * j:128 * j + 128]
            own = scale(np.abs(block).max(), 448, True)
            assert made.inverse.numpy()[i // rows, j] == np.float32(1) / own
            np.testing.assert_array_equal(made.codes.numpy()[i:i + rows, 128 * j:128 * j + 128],
                                          wanted(block * own, E4M3))


def test_lost_values_are_counted():
    """Of 4 values beyond the scale one is still nearest to the largest; infinity is none of them."""
    x = np.zeros(64, np.float32)
    x[:5] = [449, 464, 465, -1e6, np.inf]
    x[5:9] = [2.0 ** -11, -2.0 ** -12, 2.0 ** -10, 1.5 * 2.0 ** -10]    # the third is a tie, which goes to 0
    made = by_tensor(Tensor(x), E4M3, Tensor([1.0], dtype=dtypes.float32))
    assert made.lost.numpy()[1:].tolist() == [2, 3]
