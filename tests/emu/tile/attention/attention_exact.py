"""What every template of attention gives exactly, whatever its tiles: `make` is a kernel of a spec.

Protocol: asserts, as attention_case.py does; `arch` is where the kernel runs.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attention_case import arguments, attention, matrix, run
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.kernel import AttentionKernel

Make = Callable[[AttentionSpec], AttentionKernel]


def one_column_is_its_value(make: Make, arch: str, dtype: DType) -> None:
    """Of rows that see one column each."""
    spec = attention(70, 170, 64, dtype, band=Band(0, 0), start=60, heads=2)
    given = arguments(spec)
    out, _ = run(make(spec), spec, given, arch)
    assert torch.equal(out, matrix(spec, given, "v")[..., 60:130, :].double())


def equal_scores_are_a_mean(make: Make, arch: str, band: Band, dtype: DType = dtypes.bfloat16) -> None:
    """Of 256 or 64 small integers: nothing is rounded."""
    spec = attention(64, 256, 48, dtype, out=dtypes.float32, band=band, start=63, lse=True)
    given = arguments(spec)
    given["q"].zero_()
    given["v"].copy_(torch.randint(-8, 9, given["v"].shape, generator=torch.Generator().manual_seed(1)))
    out, log = run(make(spec), spec, given, arch)
    v, count = matrix(spec, given, "v").double(), 256 if band.full else 64
    firsts = [0 if band.full else row for row in range(64)]
    mean = [v[..., first:first + count, :].sum(-2) / count for first in firsts]
    assert torch.equal(out, torch.stack(mean, -2))
    assert log is not None
    assert (log - math.log(count)).abs().max() < 1e-6
