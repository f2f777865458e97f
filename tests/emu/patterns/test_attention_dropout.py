"""DEV=EMU, checks on: dropout of attention's weights in training, by flash kernels, forward and backward."""
from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.patterns.training_case import BF16, Three, made, normal, specs, stored
from tinygrad_nv import Context, Device, Tensor, TinyJit, dtypes
from tinygrad_nv.patterns.attention.named import FlashAttention, attend
from tinygrad_nv.tile.attention.dropout import keeps
from tinygrad_nv.tile.attention.spec import AttentionSpec

DEVICES = {"sm_80": "EMU:80", "sm_90a": "EMU:90"}
DEVICE = DEVICES["sm_80"]
BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)
SEED = np.array([0x9E3779B9, 17], np.uint32)


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device of a test's tensors: an A100, or what it is parametrized with."""
    arch = getattr(request, "param", "sm_80")
    monkeypatch.setenv("EMU_ARCH", arch)  # read when the device is opened
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", DEVICES[arch])
    assert Device[DEVICE].driver.properties.arch == arch
    yield
    Device[DEVICE].synchronize()


def expected(operands: Three, grad: torch.Tensor, kept: int, causal: bool,
             mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The result and gradients in float64, of the elements that are known to be kept."""
    leaves = [x.double().requires_grad_() for x in operands]
    q, k, v = (x.repeat_interleave(operands[0].shape[1] // x.shape[1], 1) for x in leaves)
    s = q @ k.transpose(-1, -2) / q.shape[-1]**0.5
    if causal: s = torch.where(torch.ones_like(s).tril().bool(), s, -torch.inf)
    if mask is not None: s = s + mask.double()
    b, heads, rows, keys = s.shape
    matrix, row, key = (x.astype(np.uint64) for x in np.ogrid[:b * heads, :rows, :keys])
    found = torch.from_numpy(keeps(row, key, matrix, SEED.astype(np.uint64), kept)).view(s.shape)
    out = (s.softmax(-1) * found * (256 / kept)) @ v
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def trained(operands: Three, kept: int, causal: bool = True,
            mask: torch.Tensor | None = None) -> None:
    """The result and its gradients, held against the exact ones within roundings of 16 bits."""
    q, k, v = (stored(x, DEVICE) for x in operands)
    grad = normal(*operands[0].shape[:3], operands[2].shape[-1], seed=9)
    masks = None if mask is None else stored(mask, DEVICE, dtypes.float32)
    y = attend(FlashAttention(causal, kept=kept), q, k, v, masks, Tensor(SEED, device=DEVICE).realize())
    wanted = [y, *y.gradient(q, k, v, gradient=stored(grad, DEVICE))]
    assert [spec.kept for spec in _forwards(*wanted)] == [kept, kept]
    Tensor.realize(*wanted)
    for mine, right in zip(wanted, expected(operands, grad, kept, causal, mask), strict=True):
        wrong = (torch.from_numpy(mine.float().numpy()).double() - right).abs()
        assert wrong.max() < 0.02 * right.abs().max()


def _forwards(*tensors: Tensor) -> tuple[AttentionSpec, AttentionSpec]:
    forward, backward = specs(*tensors)
    return forward, backward.forward


@pytest.mark.sampled(1)
@BOTH
def test_causal_heads_of_groups():
    trained(made(2, 4, 2, 70, 70), 180)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("group", [1, 3])
def test_all_see_all(group: int):
    """Query heads of a key head are told apart, though their rows lie as one."""
    trained(made(2, 2 * group, 2, 40, 150), 100, causal=False)


def test_a_mask_in_memory():
    trained(made(1, 4, 2, 40, 90), 200, False, normal(1, 1, 40, 90, seed=4))


def test_one_row_and_few_heads():
    trained(made(1, 4, 1, 1, 90), 128, False)


@pytest.mark.slow
@pytest.mark.sampled(1)
@BOTH
def test_the_tensor_method_in_training():
    """Forward and backward drop the same: the result is linear in v, so ⟨dv, v⟩ = ⟨grad, out⟩."""
    operands = made(1, 2, 2, 70, 70)
    q, k, v = (stored(x, DEVICE) for x in operands)
    grad = stored(normal(1, 2, 70, 32, seed=9), DEVICE)
    with Context(TRAINING=1):
        y = q.scaled_dot_product_attention(k, v, is_causal=True, dropout_p=0.3)
        (dv,) = y.gradient(v, gradient=grad)
        assert [spec.kept for spec in _forwards(y, dv)] == [179, 179]
        Tensor.realize(y, dv)
    sums = [(a.float() * b.float()).sum().item() for a, b in ((dv, v), (grad, y))]
    sizes = (dv.float() * v.float()).abs().sum().item()
    assert abs(sums[0] - sums[1]) < 2e-3 * sizes
    usual = q.scaled_dot_product_attention(k, v, is_causal=True, dropout_p=0.3)  # not in training
    without = q.scaled_dot_product_attention(k, v, is_causal=True)
    assert (usual.float() - without.float()).abs().max().item() == 0
    assert (usual.float() - y.float()).abs().max().item() > 0.1


def test_a_captured_step_has_a_new_seed_each_time():
    q, k, v = (stored(x, DEVICE) for x in made(1, 1, 1, 40, 40, dtype=BF16))

    @TinyJit
    def step() -> Tensor:
        y = q.scaled_dot_product_attention(k, v, dropout_p=0.5)
        return y.realize(y.gradient(v, gradient=y.ones_like())[0])
    with Context(TRAINING=1): found = [step().float().numpy().copy() for _ in range(5)]
    for i in range(4): assert not np.array_equal(found[i], found[i + 1])
