"""The UNet of Stable Diffusion on the emulated H100: which kernels it is made of, and its outputs in bfloat16
and with tf32 beside diffusers'."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import Context

from tests.support.models import diffusion_case as case
from tinygrad_nv import explain
from tinygrad_nv.models.diffusion import config, weights
from tinygrad_nv.models.diffusion.unet import UNet

C = 2.0     # x the error of the same network in bfloat16 in torch
CUT = 2.0**-8


def opened(dtype: DType) -> tuple[Any, UNet]:
    torch.manual_seed(2)
    theirs = case.unet(False)
    folder = case.saved(theirs)
    mine = UNet(config.read_unet(folder), dtype, "EMU")
    weights.load(mine, folder)
    return theirs, mine


def given(context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 4, 8, 8), torch.tensor([7]), torch.randn(1, 5, context)


def called(mine: UNet, x: torch.Tensor, times: torch.Tensor, context: torch.Tensor) -> Tensor:
    dtype = mine.dtype
    return mine(Tensor(case.nhwc(x), device="EMU").cast(dtype), Tensor(times.numpy(), device="EMU"),
                Tensor(context.numpy(), device="EMU").cast(dtype))


def test_convolutions_group_norms_and_attention_are_kernels_of_ours():
    _, mine = opened(dtypes.bfloat16)
    kernels = str(explain(called(mine, *given(mine.config.context))))
    assert [name for name in ("conv_wgmma", "group_norm", "flash", "gemm") if name not in kernels] == []


@pytest.mark.slow
@pytest.mark.parametrize("tf32", [False, True])
def test_outputs(tf32: bool):
    theirs, mine = opened(dtypes.float32 if tf32 else dtypes.bfloat16)
    x, times, context = given(mine.config.context)
    with torch.no_grad():
        wanted = case.nhwc(theirs.double()(x.double(), times, context.double()).sample)
        narrow = case.nhwc(theirs.bfloat16()(x.bfloat16(), times, context.bfloat16()).sample.float())
    with Context(ALLOW_TF32=1): found = called(mine, x, times, context).float().numpy()
    error, usual = (np.square(each - wanted).mean() ** 0.5 for each in (found, narrow))
    assert error <= (CUT * np.abs(wanted).max() if tf32 else C * usual)
