"""Convolutions and group norm by name, and Tensor.conv2d: torch's numbers and gradients, one kernel, captured
and batched as well."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit

from tinygrad_nv import disabled, explain
from tinygrad_nv.functional import convolution, group_norm
from tinygrad_nv.transforms import vmap


def of(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers."""
    return np.random.default_rng(seed + sum(shape)).integers(-3, 4, shape).astype(np.float32)


METHODS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 16, 12, 11), (24, 16, 3, 3), {"padding": 1}),
    "other strides": ((2, 16, 12, 11), (24, 16, 3, 5), {"stride": (2, 1), "padding": (1, 2)}),
    "one dimension": ((2, 40, 100), (32, 40, 3), {"stride": 2, "padding": 1})}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", METHODS)
def test_conv2d(name):
    (shape, filters, options), b = METHODS[name], of(METHODS[name][1][0])
    x, w = of(*shape), of(*filters)
    given = [Tensor(each).realize() for each in (x, w, b)]
    theirs = [torch.tensor(each, requires_grad=True) for each in (x, w, b)]
    y = given[0].conv2d(*given[1:], **options)
    wanted = (torch.conv1d if len(shape) == 3 else torch.conv2d)(*theirs, **options)
    assert "conv" in str(explain(y))
    np.testing.assert_array_equal(y.numpy(), wanted.detach().numpy())
    wanted.square().sum().backward()
    for mine, other in zip(y.square().sum().gradient(*given), theirs, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.grad.numpy())


def test_padding_of_one_side():
    x, w = of(1, 8, 17, 20), of(16, 8, 3, 3)
    y = Tensor(x).conv2d(Tensor(w), stride=2, padding=(0, 1, 2, 0))
    padded = torch.nn.functional.pad(torch.tensor(x), (0, 1, 2, 0))
    np.testing.assert_array_equal(y.numpy(), torch.conv2d(padded, torch.tensor(w), stride=2).numpy())


@pytest.mark.parametrize("options", [{"groups": 2}, {"dilation": 2}, {"padding": -1}])
def test_what_is_left_to_tinygrad(options):
    x, w = Tensor(of(1, 16, 24, 24)), Tensor(of(16, 16 // options.get("groups", 1), 3, 3))
    with disabled(): wanted = x.conv2d(w, **options).numpy()
    y = x.conv2d(w, **options)
    assert "implicit_gemm" not in str(explain(y))
    np.testing.assert_array_equal(y.numpy(), wanted)


def test_residual_and_activation():
    x, w, b, r = of(2, 9, 7, 8), of(12, 3, 3, 8), of(12), of(2, 9, 7, 12)
    y = convolution(Tensor(x), Tensor(w), Tensor(b), padding=(1, 1, 1, 1), residual=Tensor(r),
                    activation="silu")
    wanted = torch.conv2d(*(torch.tensor(each).permute(0, 3, 1, 2).double() for each in (x, w)), padding=1)
    wanted = torch.nn.functional.silu(wanted.permute(0, 2, 3, 1) + torch.tensor(b) + torch.tensor(r))
    assert np.abs(y.numpy() - wanted.numpy()).max() < 1e-5     # sums are below 100


def test_captured_and_batched():
    w, many = Tensor(of(12, 3, 3, 8)).realize(), of(3, 2, 9, 7, 8)

    def step(x: Tensor) -> Tensor: return convolution(x, w, padding=(1, 1, 1, 1))
    jit = TinyJit(lambda x: step(x).realize())
    apart = [step(Tensor(x)).numpy() for x in many]
    for x, wanted in zip(many, apart, strict=True):
        np.testing.assert_array_equal(jit(Tensor(x).realize()).numpy(), wanted)
    np.testing.assert_array_equal(vmap(step)(Tensor(many)).numpy(), np.stack(apart))


def test_group_norm_and_gradients():
    x, w, b, s = of(2, 4, 5, 12), of(12), of(12, seed=1), of(2, 12)
    given = [Tensor(each).realize() for each in (x, w, b, s)]
    theirs = [torch.tensor(each, requires_grad=True) for each in (x, w, b, s)]
    y = group_norm(given[0], 3, given[1], given[2], 1e-5, "silu", given[3])
    moved = (theirs[0] + theirs[3][:, None, None]).permute(0, 3, 1, 2)
    wanted = torch.nn.functional.silu(torch.group_norm(moved, 3, theirs[1], theirs[2], 1e-5))
    wanted = wanted.permute(0, 2, 3, 1)
    assert np.abs(y.numpy() - wanted.detach().numpy()).max() < 1e-5
    wanted.square().sum().backward()
    for mine, other in zip(y.square().sum().gradient(*given), theirs, strict=True):
        assert np.abs(mine.numpy() - other.grad.numpy()).max() < 1e-4 * max(1, other.grad.abs().max())
    many = of(3, 2, 4, 5, 12)

    def step(x: Tensor) -> Tensor: return group_norm(x, 3, given[1], given[2])
    np.testing.assert_array_equal(vmap(step)(Tensor(many)).numpy(),
                                  np.stack([step(Tensor(each)).numpy() for each in many]))
