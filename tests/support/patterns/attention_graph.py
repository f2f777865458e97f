"""Graphs of attention for unit tests: operands, and which spec is found. Nothing runs."""
from __future__ import annotations

import pytest
from tinygrad.dtype import DType

from tinygrad_nv import Device, Tensor, dtypes, explain
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.expression import Sum

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
B, H, T, S, D = 2, 4, 24, 40, 64
CAUSAL = Band(last=0)
SCALED = Sum() * 0.125
DEVICE = "EMU:80"


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of all tensors here is an A100."""
    monkeypatch.setenv("EMU_ARCH", "sm_80")  # read when the device is opened
    assert Device[DEVICE].driver.properties.arch == "sm_80"


def of(*shape: int, dtype: DType = BF16, device: str | None = None) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device=device or DEVICE)


def operands(heads: int = H, dtype: DType = BF16, rows: int = T) -> tuple[Tensor, Tensor, Tensor]:
    return of(B, H, rows, D, dtype=dtype), of(B, heads, S, D, dtype=dtype), of(B, heads, S, D, dtype=dtype)


def found(*tensors: Tensor) -> AttentionSpec:
    """The spec of the one kernel that makes the tensors."""
    (kernel,) = explain(*tensors).kernels
    assert isinstance(kernel.spec, AttentionSpec), kernel.reason
    return kernel.spec


def left(*tensors: Tensor) -> str:
    """Why there is no attention of ours, after checking that there is none."""
    lowered = explain(*tensors)
    assert not any(isinstance(kernel.spec, AttentionSpec) for kernel in lowered.kernels)
    words = [*(kernel.reason for kernel in lowered.kernels), *lowered.notes]
    return "; ".join(word for word in words if word.startswith("attention: "))


def positions(rows: int = T, columns: int = S) -> tuple[Tensor, Tensor]:
    return Tensor.arange(rows).reshape(rows, 1), Tensor.arange(columns).reshape(1, columns)


def scores(dtype: DType = BF16) -> tuple[Tensor, Tensor]:
    """Scaled scores in float32, and v."""
    q, k, v = operands(dtype=dtype)
    return (q @ k.transpose(-1, -2)).float() * 0.125, v


def attended(x: Tensor, v: Tensor) -> Tensor: return x.softmax(-1).cast(v.dtype) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v
