"""Operations of rows that no file of the package names: plain tinygrad, or angles of one's own, are programs
of the tile language on a CPU and on emulated GPUs of two architectures, forward and backward."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.graphs.pool_case import device
from tinygrad_nv import explain
from tinygrad_nv.functional import rotate_heads

TARGETS = ("CPU", "sm_80", "sm_90a")
PROGRAMS = {"norm", "elements", "pieces", "column_sum", "rope"}     # as kernels' notes name them
B, T, H, KV, D = 2, 9, 4, 2, 32
EPS = 1e-6
Arrays = dict[str, np.ndarray]


@pytest.fixture(params=TARGETS)
def where(request: pytest.FixtureRequest) -> str:
    """The name of a device."""
    return "CPU" if request.param == "CPU" else device(arch=request.param).device


def draw(seed: int, **shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def on(where: str, x: np.ndarray, dtype: DType = dtypes.float32) -> Tensor:
    return Tensor(x, device=where).cast(dtype).contiguous().realize()


def are_programs(*tensors: Tensor) -> None:
    """Checks that every kernel is a program of the tile language, whose passes there are."""
    kernels = explain(*tensors).kernels
    assert kernels
    for each in kernels:
        assert each.template in PROGRAMS, each
        assert each.passes("trace").partition("program ")[2]


# **** a norm with a gate, as Mamba-2 and Qwen3-Next have it ****

def gated_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    wide = x.float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).cast(x.dtype) * weight
    return (normed.float() * gate.float().silu()).cast(x.dtype)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
def test_a_norm_with_a_gate(where: str, dtype: DType) -> None:
    arrays = draw(1, x=(40, 64), weight=(64,), gate=(40, 64), dy=(40, 64))
    x, weight, gate, dy = (on(where, each, dtype) for each in arrays.values())
    y = gated_norm(x, weight, gate)
    gradients = y.gradient(x, weight, gate, gradient=dy)
    are_programs(y)
    are_programs(*gradients)

    given = [torch.from_numpy(each.float().numpy()).double().requires_grad_() for each in (x, weight, gate)]
    a, w, g = given
    want = a * (a.square().mean(-1, keepdim=True) + EPS).rsqrt() * w * torch.nn.functional.silu(g)
    want.backward(torch.from_numpy(dy.float().numpy()).double())
    bound = 2e-5 if dtype == dtypes.float32 else 2.0 ** -6
    for got, right in zip((y, *gradients), (want.detach(), *(each.grad for each in given)), strict=True):
        assert right is not None
        largest = float(right.abs().max())
        assert float(np.abs(got.float().numpy() - right.numpy()).max()) <= bound * largest


# **** rotary positions with scaled frequencies and amplitude, as YaRN has them ****

def yarn(where: str, positions: int, half: int, factor: float = 8.0, theta: float = 1e4,
         trained: int = 64) -> tuple[Tensor, Tensor]:
    """Cosines and sines in the graph: low frequencies are divided by the factor, all are a little larger."""
    frequency = theta ** (-Tensor.arange(half).float() / half)
    turns = trained * frequency / (2 * math.pi)
    kept = ((turns - 1) / 31).clip(0, 1)
    angle = Tensor.arange(positions).float()[:, None] * (
        frequency * kept + frequency / factor * (1 - kept))
    amplitude = 0.1 * math.log(factor) + 1
    return (angle.cos() * amplitude).to(where), (angle.sin() * amplitude).to(where)


def test_rotary_positions_of_scaled_frequencies(where: str) -> None:
    arrays = draw(2, qkv=(B, T, (H + 2 * KV) * D), dq=(B, H, T, D), dk=(B, KV, T, D), dv=(B, KV, T, D))
    qkv, *given = (on(where, each) for each in arrays.values())
    cos, sin = yarn(where, T, D // 2)
    results = rotate_heads(qkv, cos, sin, H, KV)
    loss = sum((each * dy).sum() for each, dy in zip(results, given, strict=True))
    assert isinstance(loss, Tensor)
    gradient, = loss.gradient(qkv)
    for made in (results, (gradient,)):
        assert "rope" in [each.template for each in explain(*made).kernels]

    c, s = (torch.from_numpy(each.numpy()).double() for each in (cos, sin))
    x = torch.from_numpy(arrays["qkv"]).double().requires_grad_()
    q, k, v = x.reshape(B, T, -1, D).transpose(1, 2).split([H, KV, KV], 1)
    rotated = [torch.cat([low * c - high * s, high * c + low * s], -1)
               for low, high in (each.chunk(2, -1) for each in (q, k))]
    want = [*rotated, v]
    torch.autograd.backward(want, [torch.from_numpy(arrays[name]).double() for name in ("dq", "dk", "dv")])
    assert x.grad is not None
    for got, right in zip((*results, gradient), (*(each.detach() for each in want), x.grad), strict=True):
        np.testing.assert_allclose(got.numpy(), right.numpy(), atol=3e-6)
