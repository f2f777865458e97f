"""Attention as graphs have it, for tests on DEV=EMU: operands, the answer in float64, and comparisons.

Protocol: a test file has a fixture that calls `use(monkeypatch, arch)`. `near(y, operands, scores)` runs a
graph, which must be one kernel of attention among so many kernels; `close` compares.

A result may be off by twice the largest error of a plain attention of the same operands, whose scores and
softmax are float32 and whose weights are rounded to v's dtype, and by the rounding of the result.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tinygrad.dtype import DType

from tests.support.tile.gemm_case import TORCH
from tinygrad_nv import Device, Tensor, dtypes, explain
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.decode.spec import DecodeSpec

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}
HIDDEN = -torch.inf
Scores = Callable[[torch.Tensor], torch.Tensor]


# **** operands and answers ****

DEVICES = {"sm_80": "EMU:80", "sm_90a": "EMU:90"}
_device = DEVICES["sm_80"]


def use(monkeypatch: pytest.MonkeyPatch, arch: str) -> str:
    """The device of the tensors that follow: an A100's, or an H100's."""
    global _device
    monkeypatch.setenv("EMU_ARCH", arch)  # read when the device is opened
    _device = DEVICES[arch]
    assert Device[_device].driver.properties.arch == arch
    return _device


def normal(*shape: int, seed: int = 0, dtype: DType = BF16) -> torch.Tensor:
    """Normal numbers that the dtype holds."""
    random = torch.Generator().manual_seed(seed * 1000 + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64).to(TORCH[dtype])


def stored(x: torch.Tensor, dtype: DType = BF16) -> Tensor:
    """A tensor in memory."""
    return Tensor(x.float().numpy(), device=_device).cast(dtype).contiguous().realize()


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, wide: torch.dtype,
          rounded: torch.dtype | None = None) -> torch.Tensor:
    """softmax(scores(q kᵀ)) v in `wide`, with weights rounded. Rows that see nothing are 0."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.to(wide).repeat_interleave(group, -3) for x in (k, v))
    x = scores(q.to(wide) @ k.transpose(-1, -2))
    w = torch.nan_to_num(torch.softmax(x, -1), nan=0.0)
    if rounded is not None: w = w.to(rounded).to(wide)
    return (w @ v).double()


def near(y: Tensor, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scores: Scores,
         kernels: int = 1) -> AttentionSpec | DecodeSpec:
    """Runs `y`, which must be one attention among so many kernels, and compares."""
    lowered = explain(y).kernels
    (spec,) = [kernel.spec for kernel in lowered if isinstance(kernel.spec, AttentionSpec | DecodeSpec)]
    assert len(lowered) == kernels, [kernel.name for kernel in lowered]
    close(torch.tensor(y.float().numpy()).double(), operands, scores, y.dtype)
    return spec


def close(got: torch.Tensor, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scores: Scores,
          dtype: DType) -> None:
    exact = plain(*operands, scores, torch.float64)
    error = (plain(*operands, scores, torch.float32, operands[2].dtype) - exact).abs().max()
    assert got.shape == exact.shape
    worst = ((got - exact).abs() - 2 * error - UNIT[dtype] * exact.abs()).max()
    assert worst <= 1e-30, f"{worst:g} above the bound, a plain one is off by {error:g}"


def made(b: int = 1, heads: int = 2, kv: int = 2, rows: int = 20, keys: int = 150, d: int = 64,
         dtype: DType = BF16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of [B, H, S, D]: 150 keys are more blocks than any ring here has stages, and two more."""
    k, v = (normal(b, kv, keys, d, seed=seed + i, dtype=dtype) for i in (1, 2))
    return normal(b, heads, rows, d, seed=seed, dtype=dtype), k, v


def of(operands: tuple[torch.Tensor, ...], dtype: DType = BF16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (stored(x, dtype) for x in operands)
    return q, k, v


def scaled(x: torch.Tensor) -> torch.Tensor: return x * 0.125


def seen(rows: int, keys: int, condition: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Scores:
    """Scaled scores, hidden where the condition does not hold."""
    mask = condition(torch.arange(rows)[:, None], torch.arange(keys)[None, :])
    return lambda x: torch.where(mask, x * 0.125, HIDDEN)


def causal(rows: int, keys: int) -> Scores: return seen(rows, keys, lambda r, c: c <= r)
