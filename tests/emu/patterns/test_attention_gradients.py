"""DEV=EMU, checks on: gradients of attention by flash kernels, forward and backward, against float64, and
dropout of its weights."""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType

from tests.support.patterns.training_case import (
    BF16,
    F16,
    HIDDEN,
    Scores,
    Three,
    attended,
    causal,
    gradients,
    largest,
    made,
    near,
    normal,
    scaled,
    seen,
    specs,
    stored,
    templates,
)
from tinygrad_nv import Context, Device, Tensor, TinyJit, dtypes
from tinygrad_nv.functional import scaled_dot_product_attention
from tinygrad_nv.patterns.attention.named import FlashAttention, attend
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.dropout import keeps
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import loads

DEVICES = {"sm_80": "EMU:80", "sm_90a": "EMU:90"}
DEVICE = DEVICES["sm_80"]
BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device of a test's tensors: an A100, or what it is parametrized with."""
    arch = getattr(request, "param", "sm_80")
    monkeypatch.setenv("EMU_ARCH", arch)  # read when the device is opened
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", DEVICES[arch])
    assert Device[DEVICE].driver.properties.arch == arch
    yield
    Device[DEVICE].synchronize()


def trained(operands: Three, attention: Attention, scores: Scores, dtype: DType = BF16,
            seed: int = 9) -> tuple[AttentionSpec, BackwardSpec]:
    """Gradients of an attention's three operands, held against float64; the specs of its two kernels."""
    q, k, v = (stored(x, DEVICE, dtype) for x in operands)
    grad = normal(*operands[0].shape[:3], operands[2].shape[-1], seed=seed, dtype=dtype)
    y = attention(q, k, v)
    wanted = y.gradient(q, k, v, gradient=stored(grad, DEVICE, dtype))
    found = specs(*wanted)
    Tensor.realize(*wanted)
    near(wanted, operands, scores, grad)
    return found


def simple(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.scaled_dot_product_attention(k, v, enable_gqa=True)


def in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_all_see_all(dtype: DType):
    operands = made(dtype=dtype)
    trained(operands, simple, scaled(), dtype)


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_causal_with_heads_that_share_keys(seed: int):
    operands = made(b=2, heads=4, rows=150, seed=seed)
    forward, _ = trained(operands, in_order, causal(150, 150), seed=seed + 9)
    assert forward.band.last == 0
    assert forward.batch[2] == 2


@pytest.mark.sampled(1)
@BOTH
def test_wider_heads():
    operands = made(heads=1, kv=1, rows=70, d=128)
    trained(operands, in_order, causal(70, 150, 128))


@pytest.mark.sampled(1)
@BOTH
def test_sums_in_one_order(monkeypatch: pytest.MonkeyPatch):
    operands = made(rows=70)
    _, spec = trained(operands, in_order, causal(70, 150))
    assert not spec.deterministic
    monkeypatch.setenv("NV_DETERMINISTIC", "1")
    _, spec = trained(operands, in_order, causal(70, 150))
    assert spec.deterministic


def test_values_of_another_width():
    trained(made(rows=20, d=32, d_v=64), simple, scaled())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows(rows: int):
    trained(made(heads=4, rows=rows), simple, scaled())


# **** scores and masks ****

def capped(x: torch.Tensor) -> torch.Tensor: return 5 * torch.tanh(x * 0.3 / 5)


@pytest.mark.sampled(1)
@BOTH
def test_soft_cap_and_scale():
    trained(made(), lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.3, softcap=5), capped)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
def test_windows(causal: bool):
    def near_by(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return ((r - c).abs() < 20) & ((c <= r) if causal else (c >= 0))
    forward, _ = trained(made(rows=100), lambda q, k, v: scaled_dot_product_attention(
        q, k, v, is_causal=causal, window=20), seen(100, 150, near_by))
    ends = forward.band.first, forward.band.last
    assert [end + forward.start for end in ends] == [-19, 0 if causal else 19]


def test_a_band_that_is_made_as_a_mask_of_floats():
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = Tensor.full((1, 1, 40, 150), HIDDEN, device=DEVICE).triu(1)
        return q.scaled_dot_product_attention(k, v, attn_mask=mask)
    forward, _ = trained(made(), attention, causal(40, 150))
    assert forward.band.last == 0
    assert not loads(forward.score)


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("shape", [(40, 150), (1, 2, 1, 150), (2, 1, 40, 150)], ids=str)
def test_masks_in_memory(shape: tuple[int, ...]):
    values = normal(*shape, seed=5)
    mask = Tensor((values > 0).numpy(), device=DEVICE).contiguous().realize()
    forward, _ = trained(made(b=shape[0] if len(shape) == 4 else 1),
                         lambda q, k, v: q.scaled_dot_product_attention(k, v, attn_mask=mask),
                         lambda x: torch.where(values > 0, x / 32**0.5, HIDDEN))
    assert len(loads(forward.score)) == 1


@pytest.mark.sampled(1)
@BOTH
def test_a_mask_of_floats_and_its_gradient():
    operands, values = made(heads=4), normal(4, 40, 150, seed=5)
    bias, device = stored(values, DEVICE), DEVICE
    def biased(x: torch.Tensor) -> torch.Tensor: return x / 32**0.5 + values.to(x.dtype)
    trained(operands, lambda q, k, v: q.scaled_dot_product_attention(k, v, bias, enable_gqa=True), biased)
    # and that of the mask itself, by float64
    q, k, v = (stored(x, device) for x in operands)
    grad = normal(*operands[0].shape, seed=9)
    y = q.scaled_dot_product_attention(k, v, bias, enable_gqa=True)
    (of_bias,) = y.gradient(bias, gradient=stored(grad, device))
    wide = values.double().requires_grad_()
    exact = attended(*(x.double() for x in operands), lambda x: x / 32**0.5 + wide)
    (right,) = torch.autograd.grad(exact, wide, grad.double())
    got = torch.tensor(of_bias.float().numpy()).double()
    assert (got - right).abs().max() <= 2.0**-7 * right.abs().max()


def test_rows_that_see_nothing_have_no_part():
    hidden = torch.arange(40)[:, None].expand(40, 150) >= 30
    mask = Tensor((~hidden).numpy(), device=DEVICE).contiguous().realize()
    def scores(x: torch.Tensor) -> torch.Tensor: return torch.where(hidden, HIDDEN, x / 32**0.5)
    trained(made(), lambda q, k, v: q.scaled_dot_product_attention(k, v, attn_mask=mask), scores)


def test_keys_that_no_row_sees_have_no_gradient():
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.scaled_dot_product_attention(k, v, attn_mask=Tensor.arange(150) < 117)
    forward, _ = trained(made(), attention, seen(40, 150, lambda r, c: c < 117))
    assert forward.s_kv == 117


# **** where operands lie ****

def test_heads_of_one_projection_are_read_where_they_lie():
    b, rows, heads, kv, d = 2, 48, 4, 2, 32
    whole = normal(b, rows, (heads + 2 * kv) * d, seed=3)
    grad = normal(b, rows, heads * d, seed=4)

    def split(x: torch.Tensor) -> Three:
        parts = x.reshape(b, rows, -1, d).transpose(1, 2)
        return parts[:, :heads], parts[:, heads:heads + kv], parts[:, heads + kv:]
    x = stored(whole, DEVICE)
    parts = x.split([heads * d, kv * d, kv * d], -1)
    q, k, v = (part.reshape(b, rows, -1, d).transpose(1, 2) for part in parts)
    y = in_order(q, k, v).transpose(1, 2).reshape(b, rows, heads * d)
    (dx,) = y.gradient(x, gradient=stored(grad, DEVICE))
    # delta, and three gradients side by side
    assert templates(dx) == ["flash_mma", None, "flash_backward_mma", None]
    turned = grad.reshape(b, rows, heads, d).transpose(1, 2)
    exact = gradients(split(whole), causal(rows, rows), turned)
    got = torch.tensor(dx.float().numpy()).double()
    for one, right in zip(split(got), exact, strict=True):
        assert (one - right).abs().max() <= 2.0**-6 * right.abs().max()


def test_gradients_that_lie_otherwise():
    operands, grad = made(), normal(1, 32, 40, 2, seed=8)
    q, k, v = (stored(x, DEVICE) for x in operands)
    wanted = simple(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICE).permute(0, 3, 2, 1))
    _, backward = specs(*wanted)
    assert backward.grad.row == 32  # copied: along a head its elements are not side by side
    near(wanted, operands, scaled(), grad.permute(0, 3, 2, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 40, 1), (1, 1, 1, 32)], ids=str)
def test_gradients_that_repeat(shape: tuple[int, ...]):
    """As those of `(out * scale).sum()`: what has stride 0 along d cannot be read where it lies."""
    operands, grad = made(), normal(*shape, seed=8)
    whole = tuple(operands[0].shape)
    q, k, v = (stored(x, DEVICE) for x in operands)
    wanted = simple(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICE).expand(whole))
    assert "flash_backward_mma" in templates(*wanted)
    near(wanted, operands, scaled(), grad.expand(whole).contiguous())


def test_gradients_that_lie_backwards():
    operands, grad = made(), normal(1, 2, 40, 32, seed=8)
    q, k, v = (stored(x, DEVICE) for x in operands)
    wanted = simple(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICE).flip(2))
    near(wanted, operands, scaled(), grad.flip(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("lead_q", "lead_k"), [((), ()), ((2,), (2,)), ((2,), ()), ((), (2,)),
                                                ((2, 3, 2), (3, 2)), ((2, 2), (2, 1))], ids=str)
def test_other_ranks(lead_q: tuple[int, ...], lead_k: tuple[int, ...]):
    operands = normal(*lead_q, 40, 32), *(normal(*lead_k, 70, 32, seed=seed) for seed in (1, 2))
    q, k, v = (stored(x, DEVICE) for x in operands)
    y = q.scaled_dot_product_attention(k, v)
    leaves = [x.double().requires_grad_() for x in operands]
    right = torch.nn.functional.scaled_dot_product_attention(*leaves)
    grad = normal(*right.shape, seed=4)
    assert y.shape == right.shape
    wanted = [y, *y.gradient(q, k, v, gradient=stored(grad, DEVICE))]
    specs(*wanted)
    for one, exact in zip(wanted, (right, *torch.autograd.grad(right, leaves, grad.double())), strict=True):
        got = torch.tensor(one.float().numpy()).double()
        assert (got - exact).abs().max() <= 2.0**-6 * exact.abs().max()


# **** what is in memory, and how it is known to be right ****

def test_nothing_of_all_pairs_is_in_memory():
    q, k, v = (stored(x, DEVICE) for x in made(heads=1, kv=1, rows=128, keys=128, d=16))
    y = in_order(q, k, v)
    wanted = [y, *y.gradient(q, k, v, gradient=q)]
    assert set(templates(*wanted)) == {"flash_mma", None, "flash_backward_mma"}
    assert largest(*wanted) < 128 * 128


def test_finite_differences():
    operands, grad = made(rows=24, keys=40, d=16, dtype=F16), normal(1, 2, 24, 16, seed=9, dtype=F16)
    q, k, v = (stored(x, DEVICE, F16) for x in operands)
    wanted = in_order(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICE, F16))
    for i, one in enumerate(wanted):
        step, values = normal(*operands[i].shape, seed=20 + i).double(), []
        for by in (1e-4, -1e-4):
            moved = [x.double() + by * step if j == i else x.double() for j, x in enumerate(operands)]
            values.append((attended(*moved, causal(24, 40, 16)) * grad.double()).sum())
        slope = float(values[0] - values[1]) / 2e-4
        got = torch.tensor(one.float().numpy()).double()
        assert math.isclose(float((got * step).sum()), slope, abs_tol=2.0**-10 * float((got * step).norm()))


# **** what has no kernels ****

def test_a_backward_pass_without_a_kernel_is_the_body():
    operands, grad = made(heads=1, kv=1, rows=20, keys=24, d=16), normal(1, 1, 20, 16, seed=9)
    q, k, v = (stored(x, DEVICE) for x in operands)
    wanted = in_order(q, k, v).gradient(q, k, v, gradient=stored(grad, DEVICE))
    near(wanted, operands, causal(20, 24, 16), grad)


# **** dropout of weights ****

SEED = np.array([0x9E3779B9, 17], np.uint32)


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


def trained_with_dropout(operands: Three, kept: int, causal: bool = True,
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
    trained_with_dropout(made(2, 4, 2, 70, 70), 180)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("group", [1, 3])
def test_all_see_all_with_dropout(group: int):
    """Query heads of a key head are told apart, though their rows lie as one."""
    trained_with_dropout(made(2, 2 * group, 2, 40, 150), 100, causal=False)


def test_a_mask_in_memory():
    trained_with_dropout(made(1, 4, 2, 40, 90), 200, False, normal(1, 1, 40, 90, seed=4))


def test_one_row_and_few_heads():
    trained_with_dropout(made(1, 4, 1, 1, 90), 128, False)


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
