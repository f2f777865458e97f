"""DEV=EMU, checks on: attention between its projections in training: nothing is cast, copied or turned by a
kernel of its own but what is said here."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tinygrad_nv import Context, Device, Tensor, disabled, dtypes, explain
from tinygrad_nv.functional import rotate_heads, scaled_dot_product_attention

B, T, H, KV, D = 2, 40, 4, 2, 16
BF16 = dtypes.bfloat16
DEVICES = {"sm_80": "EMU:80", "sm_90a": "EMU:90"}
UNIT = 2.0**-8      # of bfloat16


@pytest.fixture(params=DEVICES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device of each architecture."""
    monkeypatch.setenv("EMU_ARCH", request.param)   # read when the device is opened
    name = DEVICES[request.param]
    assert Device[name].driver.properties.arch == request.param
    yield name
    Device[name].synchronize()


def inputs(device: str) -> list[Tensor]:
    """x, q|k|v's weight, the output's weight, cosines, sines, the gradient."""
    random = np.random.default_rng(7)
    shapes = ((B, T, H * D), ((H + 2 * KV) * D, H * D), (H * D, H * D), (T, D // 2), (B, T, H * D))
    x, w, o, angles, grad = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    made = x, w / 8, o / 8, np.cos(angles), np.sin(angles), grad
    return [Tensor(each, device=device).cast(BF16).contiguous().realize() for each in made]


def derived(x: Tensor, w: Tensor, o: Tensor, cos: Tensor, sin: Tensor, grad: Tensor) -> list[Tensor]:
    """The result and the gradients of x and of both weights, as models/attention.py computes them."""
    q, k, v = rotate_heads((x @ w.T).contiguous(), cos, sin, H, KV)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = out.transpose(1, 2).reshape(B, T, -1).contiguous() @ o.T
    return [y, *y.gradient(x, w, o, gradient=grad)]


def test_kernels(gpu: str):
    """The one kernel of tinygrad's own adds up rows of the gradient times the result."""
    kernels = explain(*derived(*inputs(gpu))).kernels
    assert [each.template for each in kernels].count(None) == 1, [each.name for each in kernels]
    rope = next(each for each in kernels if each.template == "rope" and "gradient" in str(each.spec))
    assert rope.spec.wide_q


@pytest.mark.sampled(1)
def test_numbers(gpu: str):
    """Beside the same in float32: no further off than twice tinygrad's own in bfloat16, and one rounding."""
    given = inputs(gpu)
    ours = [each.float().numpy() for each in derived(*given)]
    wide = [Tensor(each.float().numpy(), device="CPU") for each in given]
    with disabled(), Context(NOOPT=1):      # compiled sooner
        exact = [each.numpy() for each in derived(*wide)]
        plain = [each.float().numpy() for each in derived(*(each.cast(BF16) for each in wide))]
    for mine, true, usual in zip(ours, exact, plain, strict=True):
        error = np.abs(usual - true).max()
        assert 0 < error < 0.1 * np.abs(true).max()
        assert np.abs(mine - true).max() <= 2 * error + UNIT * np.abs(true).max()
