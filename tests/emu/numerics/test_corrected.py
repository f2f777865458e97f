"""Norms of float16, sums of exponentials, activations, losses and FP8 on both devices, beside torch."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Context, Tensor, dtypes, nn
from torch.nn import functional as F

from tinygrad_nv import elementary
from tinygrad_nv.transforms import grad

INF, NAN = math.inf, math.nan
NARROW = [("float16", 2e-3), ("bfloat16", 1.6e-2)]    # two units in the last place


@pytest.fixture(params=["CPU", "EMU"], autouse=True)
def device(request):
    with Context(DEV=request.param):
        assert Tensor([1.0]).device == request.param
        yield request.param


def close(own: Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(own.float().numpy(), want.detach().float().numpy(), tolerance, tolerance)


def narrow(x: np.ndarray, dtype: str) -> tuple[Tensor, torch.Tensor]:
    """Rounded numbers: in the dtype, and in float64."""
    given = torch.tensor(x, dtype=torch.float32).to(getattr(torch, dtype))
    return Tensor(given.float().numpy()).cast(getattr(dtypes, dtype)).realize(), given.double()


def test_numbers_of_float16():
    x = Tensor([[0.5, 2.0**-24], [65504, -INF]]).half()
    assert (x.tolist(), x[1, 0].item()) == ([[0.5, 2.0**-24], [65504, -INF]], 65504)


# **** norms ****

@pytest.mark.parametrize(("dtype", "tolerance"), NARROW)
@pytest.mark.parametrize(("mean", "deviation"), [(0, 1000), (100, 0.5), (30000, 1000), (0, 1e-3)])
def test_norms(dtype, tolerance, mean, deviation):
    x, t = narrow(np.random.default_rng(0).standard_normal((6, 256)) * deviation + mean, dtype)
    y, rms = x - x.mean(-1, keepdim=True), (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    images = F.instance_norm(t.reshape(1, 6, 16, 16)).reshape(6, 256)
    for own, want in ((x.layernorm(), F.layer_norm(t, (256,))),
                      (y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), F.layer_norm(t, (256,))),
                      (y / ((y * y).mean(-1, keepdim=True) + 1e-5).sqrt(), F.layer_norm(t, (256,))),
                      (y * ((y ** 2).mean(-1, keepdim=True) + 1e-5) ** -0.5, F.layer_norm(t, (256,))),
                      (x.normalize(dim=-1), F.normalize(t)),
                      (x.std(-1), t.std(-1)), (x * rms, F.rms_norm(t, (256,), eps=1e-5)),
                      (nn.InstanceNorm(6, affine=False)(x.reshape(1, 6, 16, 16)).reshape(6, 256), images),
                      (nn.BatchNorm(256, affine=False, track_running_stats=False)(x),
                       F.batch_norm(t, None, None, training=True))):
        close(own, want, tolerance)
    if deviation < 250: close(x.var(-1), t.var(-1), tolerance)    # float16 holds no more


@pytest.mark.parametrize(("dtype", "tolerance"), NARROW)
def test_the_gradient_of_a_norm(dtype, tolerance):
    x, t = narrow(np.random.default_rng(1).standard_normal((4, 128)) * 300 + 500, dtype)
    w, v = narrow(np.random.default_rng(2).standard_normal((4, 128)) * 300, dtype)
    (F.layer_norm(t.requires_grad_(), (128,)) * v).sum().backward()
    scale = t.grad.abs().max()
    close(grad(lambda x: (x.layernorm() * w).sum())(x) / scale.item(), t.grad / scale, tolerance)


def test_gradients_of_equal_maxima():
    for dtype, count in (("float16", 70000), ("bfloat16", 3000), ("float32", 70000)):
        x, _ = narrow(np.zeros((1, count)), dtype)
        want = torch.tensor(1 / count).to(getattr(torch, dtype)).item()
        assert set(grad(lambda x: x.max())(x).float().numpy()[0, ::99].tolist()) == {want}


# **** sums of exponentials ****

ROWS = np.array([[1, 2, 3], [-INF] * 3, [INF, 1, 2], [INF, INF, 1], [-INF, 1, 2], [NAN, 1, 2],
                 [INF, -INF, 0]])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_with_infinities(dtype):
    x, t = narrow(ROWS, dtype)
    tolerance = 1e-3 if dtype == "float16" else 1e-6
    close(x.logsumexp(-1), t.logsumexp(-1), tolerance)
    close(x.logsumexp(0, keepdim=True), t.logsumexp(0, keepdim=True), tolerance)
    close(x.logcumsumexp(1), t.logcumsumexp(1), tolerance)
    close(x.logaddexp(x.flip(1)), torch.logaddexp(t, t.flip(1)), tolerance)
    rows = [0, 2, 4]
    t = t[rows].requires_grad_()
    t.logsumexp(-1).sum().backward()
    close(grad(lambda x: x.logsumexp(-1).sum())(x[Tensor(rows)]), t.grad, tolerance)


# **** activations and losses ****

AT = np.array([-3e4, -1000, -100, -89, -5, -1, -0.1, 0, 0.1, 1, 5, 89, 100, 1000, 3e4])
ACTIVATIONS: dict[str, Any] = {
    "elu": F.elu, "celu": F.celu, "selu": F.selu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "hardswish": F.hardswish, "softplus": F.softplus, "logsigmoid": F.logsigmoid}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_two_derivatives(name, device):
    for dtype, tolerance in (("float32", 2e-5), ("float16", 1e-2))[:1 + (device == "CPU")]:
        def first(x: Tensor) -> Tensor: return grad(lambda x: getattr(x, name)().sum())(x)
        x, t = narrow(AT[AT != 0] if name == "selu" else AT, dtype)    # 0 is a corner of selu
        y = ACTIVATIONS[name](t.requires_grad_())
        one, = torch.autograd.grad(y.sum(), t, create_graph=True)
        two, = torch.autograd.grad(one.sum(), t)
        close(getattr(x, name)(), y.to(getattr(torch, dtype)), tolerance)
        close(first(x), one, tolerance)
        close(grad(lambda x: first(x).sum())(x), two, tolerance)


def test_derivatives_at_zero(device):
    names = ("erf", "asin", "acos", "atan", "atanh", "asinh", "sinh", "tanh", "expm1", "log1p", "relu",
             "gelu", "softplus", "silu", "leaky_relu", "abs", "sqrt", "square")
    x, t = Tensor([0.0, -0.0, 0.25]), torch.tensor([0.0, -0.0, 0.25], requires_grad=True)
    for name in names if device == "CPU" else names[:4]:
        options = ("none",) if name == "gelu" else ()
        want, = torch.autograd.grad((getattr(torch, name, None) or getattr(F, name))(t).sum(), t)
        for own in (getattr(Tensor, name, None), getattr(elementary, name, None)):
            if own is not None:
                made = grad(lambda x, own=own, options=options: own(x, *options).sum())(x)
                np.testing.assert_allclose(made.numpy(), want, 2e-4, 2e-4, err_msg=name)


def test_max_pool_of_NaN(device):
    images = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype(np.float32)
    images[0, 0, 1, 1] = images[0, 0, 1, 2] = images[0, 1, 0, 0] = NAN
    images[0, 1, 7, 7], images[0, 0, 4:6, 4:6] = INF, -INF
    x, t = Tensor(images), torch.tensor(images)
    for options in ((3, 2, 1), (2,))[:1 + (device == "CPU")]:
        want, places = F.max_pool2d(t, *options, return_indices=True)
        size, stride, padding = (*options, 2, 0)[:3]
        made, at = x.max_pool2d(size, stride, 1, padding, return_indices=True)
        close(made, want, 0)
        assert at.tolist() == places.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_windows_of_each_dtype(dtype, device):
    numbers = [0.0, -0.0, 1.0, -1.5, INF, -INF, -NAN, 2.0, 2.0, -3.0, 65504.0]
    images = np.random.default_rng(1).choice(numbers, (2, 6, 7)).astype(np.float32)
    images[1] = np.where(np.isfinite(images[1]), images[1], -INF)
    t, x = torch.tensor(images, dtype=getattr(torch, dtype)), Tensor(images).cast(getattr(dtypes, dtype))
    made = x.max_pool2d((3, 2), 2, 2, (1, 0), True)
    assert made.dtype == x.dtype
    close(made.float(), F.max_pool2d(t, (3, 2), 2, (1, 0), 2, True).float(), 0)


def test_windows_of_padding_and_gradients_of_windows():
    assert Tensor([[1.0]]).max_pool2d(2, 2, 1, 2).tolist() == [[-INF, -INF], [-INF, 1.0]]
    x, w = Tensor([[1.0, 1.0, -2.0, 7.0], [0.0, -0.0, -3.0, -3.0]]), Tensor([[2.0, 4.0, 0.5]])
    slope = grad(lambda x: (x.max_pool2d(2, 1) * w).sum())(x)     # of equal elements the mean
    assert slope.tolist() == [[1.0, 5.0, 0.0, 0.5], [0.0] * 4]


def test_losses_of_nothing_but_ignored_targets():
    x, all_ignored, some = Tensor.ones(3, 4), Tensor([-100] * 3), Tensor([1, -100, 2])
    losses: tuple[Any, ...] = (lambda x, y: x.sparse_categorical_crossentropy(y, ignore_index=-100),
                               lambda x, y: x.log_softmax().nll_loss(y, ignore_index=-100))
    for loss in losses:
        assert math.isnan(loss(x, all_ignored).item())
        assert grad(loss)(x, all_ignored).abs().max().item() == 0
        assert loss(x, some).item() == pytest.approx(math.log(4))
        t = torch.ones(3, 4, requires_grad=True)
        F.cross_entropy(t, torch.tensor([1, -100, 2])).backward()
        close(grad(loss)(x, some), t.grad)


# **** attention ****

@pytest.mark.parametrize("size", [8, 130])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_are_masked(dtype, size):
    given = [narrow(np.random.default_rng(i).standard_normal((1, 2, size, 32)), dtype) for i in range(3)]
    q, k, v = (x for x, _ in given)
    mask = np.zeros((size, size))
    mask[0] = mask[3] = mask[5, 2:] = torch.finfo(getattr(torch, dtype)).min    # float32: the mean of v
    mask[6] = mask[7, :4] = -INF                                                # of row 6: 0
    m, t = narrow(mask, dtype)
    want = F.scaled_dot_product_attention(*(t for _, t in given), attn_mask=t)
    close(q.scaled_dot_product_attention(k, v, attn_mask=m), want, 1e-5 if dtype == "float32" else 4e-3)
    if dtype == "float32": close(Tensor(want[0, :, 3].numpy()), given[2][1][0].mean(1))


# **** FP8 ****

@pytest.mark.parametrize(("dtype", "of_torch"), [(dtypes.fp8e4m3, torch.float8_e4m3fn),
                                                 (dtypes.fp8e5m2, torch.float8_e5m2)])
def test_casts_to_fp8_and_back_round(dtype, of_torch):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(500) * 10.0**rng.integers(-7, 3, 500)).astype(np.float32)
    x = np.append(x, np.float32([0, -0.0, NAN, 448, 2**-9, 2**-10, 3 * 2**-10, 2**-17, 464, 57344, 1.0625]))
    want = torch.tensor(x).to(of_torch).float().numpy()
    np.testing.assert_array_equal(Tensor(x).cast(dtype).float().numpy(), want)
    back = Tensor(x).cast(dtype).reshape(-1, 7).permute(1, 0).cast(dtypes.bfloat16).float() * 3
    np.testing.assert_array_equal(back.permute(1, 0).numpy().reshape(-1), want * 3)
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(Tensor(codes).bitcast(dtype).float().numpy(),
                                  torch.tensor(codes).view(of_torch).float().numpy())


@pytest.mark.parametrize(("dtype", "of_torch"), [(dtypes.fp8e4m3, torch.float8_e4m3fn),
                                                 (dtypes.fp8e5m2, torch.float8_e5m2)])
def test_stored_fp8(dtype, of_torch):
    """All halves and bfloat16s, samples of float32; and what moves codes keeps them."""
    def check(made: Tensor, want: torch.Tensor) -> None:
        """Equal codes; NaN has more than one."""
        codes, wanted = torch.tensor(made.bitcast(dtypes.uint8).numpy()), want.view(torch.uint8)
        nan = want.float().isnan()
        assert torch.equal(codes.view(of_torch).float().isnan(), nan)
        assert torch.equal(codes[~nan], wanted[~nan])
    rng, every = np.random.default_rng(0), np.arange(65536, dtype=np.uint16)
    sample = rng.standard_normal(3000) * 10.0**rng.integers(-9, 9, 3000)
    bits = rng.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    for x in (torch.tensor(every).view(torch.float16), torch.tensor(every).view(torch.bfloat16),
              torch.tensor(np.append(sample.astype(np.float32), bits))):
        given = Tensor(x.view(torch.uint16 if x.itemsize == 2 else torch.uint32).numpy())
        given = given.bitcast(getattr(dtypes, str(x.dtype).removeprefix("torch."))).realize()
        check(given.cast(dtype).realize(), x.to(of_torch))
    t = torch.arange(256, dtype=torch.uint8).view(of_torch)
    codes = Tensor(np.arange(256, dtype=np.uint8)).bitcast(dtype).realize()
    np.testing.assert_array_equal(codes.numpy(), t.float().numpy())
    check(codes.reshape(16, 16).permute(1, 0).contiguous().realize().reshape(256),
          t.reshape(16, 16).T.reshape(256))
    check((codes.float() * 3).cast(dtype).realize(), (t.float() * 3).to(of_torch))
    into = Tensor.zeros(300, dtype=dtype).contiguous().realize()
    into[3:200] = codes[3:200]      # kernels of one schedule are compiled in processes of their own
    check(into[3:200], t[3:200])
