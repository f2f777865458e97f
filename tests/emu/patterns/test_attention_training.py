"""DEV=EMU, checks on: training with attention, in each of tinygrad's modes, with ordinary Tensor code."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.support.patterns.training_case import (
    Three,
    causal,
    largest,
    made,
    near,
    normal,
    stored,
    templates,
)
from tinygrad_nv import Context, Device, Tensor, TinyJit, disabled, explain, function, nn
from tinygrad_nv.functional import scaled_dot_product_attention

DEVICES = {"sm_80": "EMU:80", "sm_90a": "EMU:90"}
FORWARD = {"sm_80": "flash_mma", "sm_90a": "flash_wgmma"}
BACKWARD = {"sm_80": "flash_backward_mma", "sm_90a": "flash_backward_wgmma"}
ARCH = "sm_80"
BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)
WRAPS = pytest.mark.parametrize("wrap", [function, lambda fn: function(fn, precompile=True),
                                         lambda fn: function(fn, precompile=True, precompile_backward=True)],
                                ids=["function", "precompiled", "precompiled backward"])
Fn = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device of a test's tensors: an A100, or what it is parametrized with."""
    arch = getattr(request, "param", "sm_80")
    monkeypatch.setenv("EMU_ARCH", arch)  # read when the device is opened
    monkeypatch.setattr(sys.modules[__name__], "ARCH", arch)
    assert Device[DEVICES[arch]].driver.properties.arch == arch
    assert Device.DEFAULT  # tinygrad does not choose one inside a function
    yield
    Device[DEVICES[arch]].synchronize()


def of(operands: Three) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (stored(x, DEVICES[ARCH]) for x in operands)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)


def both() -> set[str]: return {FORWARD[ARCH], BACKWARD[ARCH]}


# **** modes ****

@pytest.mark.sampled(1)
@BOTH
@WRAPS
def test_in_functions(wrap: Callable[[Fn], Fn]):
    operands, grad = made(heads=2, kv=1, rows=20, keys=70), normal(1, 2, 20, 32, seed=9)
    q, k, v = of(operands)
    fn = wrap(lambda q, k, v: attention(q, k, v) * 2)
    wanted = fn(q, k, v).gradient(q, k, v, gradient=stored(grad / 2, DEVICES[ARCH]))
    assert both() <= set(templates(*wanted))
    near(wanted, operands, causal(20, 70), grad)


@pytest.mark.sampled(1)
@BOTH
def test_under_jit():
    shapes = {"heads": 2, "kv": 1, "rows": 20, "keys": 70}
    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        wanted = attention(q, k, v).gradient(q, k, v, gradient=grad)
        Tensor.realize(*wanted)
        return wanted
    jitted = TinyJit(step)
    for seed in range(4):
        operands, grad = made(**shapes, seed=seed), normal(1, 2, 20, 32, seed=seed + 9)
        near(jitted(*of(operands), stored(grad, DEVICES[ARCH])), operands, causal(20, 70), grad)


@pytest.mark.slow
def test_what_is_made_while_enabled_runs_while_disabled():
    operands, grad = made(rows=20, keys=24), normal(1, 2, 20, 32, seed=9)
    q, k, v = of(operands)
    wanted = attention(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICES[ARCH]))
    with disabled():
        assert set(templates(*wanted)) == {None}
        # the library's own arithmetic rounds scores to 16 bits
        near(wanted, operands, causal(20, 24), grad, c=4)


@pytest.mark.slow
def test_left_to_tinygrad(monkeypatch: pytest.MonkeyPatch):
    q, k, v = of(made(rows=20, keys=24))
    wanted = attention(q, k, v).gradient(q, gradient=q)
    monkeypatch.setenv("NV_ATTENTION", "0")
    for one in (wanted, attention(q, k, v).gradient(q, gradient=q)):
        assert not both() & set(templates(*one))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_each_shard_has_an_attention(axis: int):
    operands, grad = made(b=2, heads=4, kv=2, rows=20, keys=70), normal(2, 4, 20, 32, seed=9)
    names = tuple(f"{DEVICES[ARCH]}{i}" for i in range(2))
    q, k, v, g = (x.shard(names, axis=axis).realize() for x in (*of(operands), stored(grad, DEVICES[ARCH])))
    wanted = attention(q, k, v).gradient(q, k, v, gradient=g)
    found = templates(*wanted)
    assert [found.count(name) for name in sorted(both())] == [2, 2]
    near(wanted, operands, causal(20, 70), grad)


@pytest.mark.slow
def test_sequences_in_shards_are_the_library_s():
    operands = made(rows=20, keys=70)
    q, k, v = (x.shard(("EMU:80", "EMU:81"), axis=None) for x in of(operands))
    rows = of(operands)[0].shard(("EMU:80", "EMU:81"), axis=2)
    got = torch.tensor(attention(rows, k, v).float().numpy())
    np.testing.assert_allclose(got, attention(q, k, v).float().numpy(), atol=2.0**-7)


# **** inference is what it was ****

@BOTH
def test_inference_is_one_kernel():
    q, k, v = of(made(rows=20, keys=70))
    for y in (attention(q, k, v), scaled_dot_product_attention(q, k, v, softcap=3.0, window=9)):
        (kernel,) = explain(y).kernels
        assert kernel.template == FORWARD[ARCH]
        assert not kernel.spec.lse


def test_a_projection_s_heads_are_read_and_written_where_they_lie():
    x, w = stored(normal(2, 64, 64), "EMU:80"), stored(normal(64, 3 * 64, seed=1), "EMU:80")
    def heads(x: Tensor) -> Tensor: return x.reshape(2, 64, 2, 32).transpose(1, 2)
    y = attention(*map(heads, (x @ w).chunk(3, -1))).transpose(1, 2).reshape(2, 64, 64) @ w[:, :64]
    assert templates(y) == ["mma", "flash_mma", "mma"]


# **** what has no kernels of ours ****

def test_float32_is_the_library_s_in_training():
    q, k, v = (x.float().contiguous().realize() for x in of(made(rows=20, keys=24)))
    y = attention(q, k, v)
    with disabled(): right = attention(q, k, v)
    assert y.uop.key == right.uop.key


@pytest.mark.slow
def test_a_refusal_is_told():
    operands, grad = made(heads=1, kv=1, rows=20, keys=24, d=20), normal(1, 1, 20, 20, seed=9)
    q, k, v = of(operands)
    wanted = attention(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICES[ARCH]))
    lowered = explain(*wanted)
    assert not both() & {kernel.template for kernel in lowered.kernels}
    words = [*lowered.notes, *(kernel.reason for kernel in lowered.kernels)]
    assert any("bf16 attention of d 20 (not a multiple of 8) on sm_80" in word for word in words), words
    near(wanted, operands, causal(20, 24, 20), grad, c=4)


# **** a transformer ****

class Block:
    """A block of a decoder: attention, and a layer after it."""

    def __init__(self, d: int = 32, heads: int = 2, kv: int = 1) -> None:
        self.heads, self.kv, self.d = heads, kv, d // heads
        shapes = (d, (heads + 2 * kv) * self.d), (d, d), (d, d)
        self.qkv, self.out, self.last = (stored(normal(*shape, seed=5) / shape[0]**0.5, DEVICES[ARCH])
                                         for shape in shapes)

    def __call__(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = (x @ self.qkv).split([self.heads * self.d, self.kv * self.d, self.kv * self.d], -1)
        q, k, v = (part.reshape(b, t, -1, self.d).transpose(1, 2) for part in parts)
        x = x + attention(q, k, v).transpose(1, 2).reshape(b, t, -1) @ self.out
        return x + x.relu() @ self.last


def losses(steps: int, jit: bool) -> list[float]:
    """The losses of a few steps of training."""
    block, x, y = Block(), *(stored(normal(2, 72, 32, seed=seed), DEVICES[ARCH]) for seed in (1, 2))
    optimizer = nn.optim.SGD(nn.state.get_parameters(block), lr=4.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (block(x) - y).float().square().mean()
        loss.backward()
        return loss.realize(*optimizer.schedule_step())
    run = TinyJit(step) if jit else step
    with Context(TRAINING=1): return [run(x, y).item() for _ in range(steps)]


@pytest.mark.slow  # of tinygrad's own attention on the emulator
@BOTH
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_block_learns_as_with_the_library_s_attention(jit: bool):
    ours = losses(4, jit)
    with disabled(): right = losses(4, jit)
    assert ours[3] < 0.8 * ours[0], (ours, right)
    np.testing.assert_allclose(ours, right, rtol=0.02)


def exact_losses(steps: int) -> list[float]:
    """The losses by torch in float32."""
    shapes = (32, 64), (32, 32), (32, 32)
    weights = [(normal(*shape, seed=5) / 32**0.5).float().requires_grad_() for shape in shapes]
    x, y = (normal(2, 72, 32, seed=seed).float() for seed in (1, 2))
    found = []
    for _ in range(steps):
        parts = (x @ weights[0]).split([32, 16, 16], -1)
        q, k, v = (part.reshape(2, 72, -1, 16).transpose(1, 2) for part in parts)
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = x + made.transpose(1, 2).reshape(2, 72, 32) @ weights[1]
        loss = (hidden + hidden.relu() @ weights[2] - y).square().mean()
        found.append(loss.item())
        for w, dw in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            with torch.no_grad(): w -= 4.0 * dw
    return found


def test_a_block_learns_as_torch_s_does():
    ours, right = losses(3, jit=False), exact_losses(3)
    assert ours[2] < ours[0]
    np.testing.assert_allclose(ours, right, rtol=0.02)


@pytest.mark.sampled(1)
@BOTH
def test_a_step_has_both_kernels_and_nothing_of_all_pairs_in_memory():
    block, t = Block(), 256
    x = stored(normal(1, t, 32), DEVICES[ARCH])
    def step() -> list[Tensor]: return block(x).sum().gradient(block.qkv, block.out, block.last)
    found = templates(*step())
    assert [found.count(name) for name in (FORWARD[ARCH], BACKWARD[ARCH])] == [1, 1]
    assert largest(*step()) < t * t
    with disabled(): assert largest(*step()) >= t * t
