"""Convolutions on a GPU: an implicit GEMM; of channels that it does not take patches in memory, and a matmul
of ours; what no template takes stays tinygrad's."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tinygrad_nv import Context, Tensor, dtypes, explain
from tinygrad_nv.functional import convolution


@pytest.fixture(autouse=True)
def emu() -> Iterator[None]:
    with Context(DEV="EMU"): yield


def of(*shape: int) -> np.ndarray:
    """Whole numbers, whose sums float32 has exactly."""
    return np.random.default_rng(sum(shape)).integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize("channels", [16, 12])
def test_a_template_or_a_matmul_of_patches(channels, method):
    x, w, b = of(2, 6, 8, channels), of(64, 3, 3, channels), of(64)
    given = [Tensor(each).cast(dtypes.bfloat16).realize() for each in (x, w, b)]
    if method:
        chw = [each.permute(0, 3, 1, 2).contiguous().realize() for each in given[:2]]
        y = chw[0].conv2d(chw[1], given[2], padding=1).permute(0, 2, 3, 1)
    else: y = convolution(*given, padding=(1, 1, 1, 1))
    names = {kernel.template for kernel in explain(y).kernels}
    assert names & ({"conv"} if channels == 16 else {"mma", "wgmma"}), names
    theirs = [torch.tensor(each).permute(0, 3, 1, 2) for each in (x, w)]
    wanted = torch.conv2d(*theirs, torch.tensor(b), padding=1)
    wanted = wanted.permute(0, 2, 3, 1).bfloat16().float().numpy()
    np.testing.assert_array_equal(y.float().numpy(), wanted)


def test_float32_is_left_to_tinygrad():
    x, w = of(1, 9, 8, 4), of(40, 3, 3, 4)
    y = convolution(Tensor(x), Tensor(w), padding=(1, 1, 1, 1))
    reasons = [kernel.reason for kernel in explain(y).kernels]
    assert any(reason.startswith("conv: ") for reason in reasons), reasons
    wanted = torch.conv2d(*(torch.tensor(each).permute(0, 3, 1, 2) for each in (x, w)), padding=1)
    np.testing.assert_array_equal(y.numpy(), wanted.permute(0, 2, 3, 1).numpy())
