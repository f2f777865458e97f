"""Convolutions and group norm by name, and Tensor.conv2d: torch's numbers and gradients, one kernel,
captured and batched as well. Dropout from a counter: what is dropped, how often, its gradient, and what
of it is kept."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context, GlobalCounters

from tinygrad_nv import disabled, explain
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import convolution, dropout, group_norm
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


def number(value: int) -> Tensor: return Tensor([value], dtype=dtypes.uint32).realize()


def words(count: int, salt: int, of: int) -> np.ndarray:
    """The hashes, by NumPy."""
    h = np.arange(count, dtype=np.uint64) * 0x9E3779B1 + salt * 0x85EBCA77
    h = (h ^ (of * 0xC2B2AE3D & 0xFFFFFFFF)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)): h = (h ^ (h >> shift)) * factor & 0xFFFFFFFF
    return h ^ (h >> 16)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.999])
def test_elements(p: float) -> None:
    """Those of the hash; 16384 draws: 5 standard deviations of the share."""
    x = Tensor.ones(64, 256)
    with Context(TRAINING=1): found = dropout(x, p, number(9), salt=5).numpy().reshape(-1)
    kept = words(found.size, 5, 9) >= int(p * 2**32)
    np.testing.assert_array_equal(found != 0, kept)
    np.testing.assert_allclose(found[kept], 1 / (1 - p), rtol=2.0**-23)
    assert abs((~kept).mean() - p) < 5 * (p * (1 - p) / found.size) ** 0.5


def test_numbers_are_independent() -> None:
    x = Tensor.ones(64, 256)
    def of(value: int, salt: int = 0) -> np.ndarray:
        with Context(TRAINING=1): return dropout(x, 0.25, number(value), salt).numpy()
    one = of(1)
    np.testing.assert_array_equal(one, of(1))
    for other in (of(2), of(1, salt=1)):
        assert abs((one == other).mean() - (0.75**2 + 0.25**2)) < 0.02


def test_gradient_and_what_is_kept() -> None:
    """That of the elements that stay, in one kernel, which reads no mask: the bytes of two gradients."""
    x = (Tensor.rand(256, 1024) + 1).contiguous().realize()     # where y is 0, an element was dropped
    grad, which = Tensor.randn(256, 1024).contiguous().realize(), number(3)
    with Context(TRAINING=1):
        y = dropout(x, 0.5, which)
        made, = y.gradient(x, gradient=grad)
        y.realize()
        GlobalCounters.reset()
        made.realize()
    assert GlobalCounters.kernel_count == 1
    assert GlobalCounters.global_mem <= 2 * grad.nbytes() + 64
    np.testing.assert_array_equal(made.numpy(), np.where(y.numpy() != 0, 2 * grad.numpy(), 0))


def test_a_captured_step_draws_by_its_number() -> None:
    x, which = Tensor.ones(1000).contiguous().realize(), number(0)
    def step() -> Tensor:
        with Context(TRAINING=1): return dropout(x, 0.5, which).contiguous().realize()
    run, made = TinyJit(step), []
    for value in range(4):
        which.assign(number(value)).realize()
        made.append(run().numpy().copy())
    for value, found in enumerate(made):
        np.testing.assert_array_equal(found != 0, words(1000, 0, value) >= 2**31)


def test_outside_of_training() -> None:
    x = Tensor.ones(4)
    assert dropout(x, 0.5, number(0)) is x
    with Context(TRAINING=1): assert dropout(x, 0.0, number(0)) is x


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match="p=1"): dropout(Tensor.ones(2), 1.0, number(0))
    with pytest.raises(SpecError, match=r"(?s)number of int \(1,\).*uint32"):
        dropout(Tensor.ones(2), 0.1, Tensor([1]))
