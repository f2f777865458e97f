"""tinygrad_nv.stdlib beside torch in float64: results and gradients.

Protocol: the error of each, by the largest value, is at most C times that of torch in float32, or EPS, four
units of float32, where that is exact.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes

from tinygrad_nv import stdlib
from tinygrad_nv.stdlib import attention
from tinygrad_nv.tile.language.schedule import TileSchedule

C, EPS = 4, 4 * 2.0**-24
Array = np.ndarray[Any, Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def held(ours: Callable[..., Tensor], theirs: Callable[..., torch.Tensor], *given: Array) -> None:
    """Compares a function's result, and the gradients of all of its arguments."""
    grad = None
    found: dict[str, list[Array]] = {}
    for name, kind in (("exact", torch.float64), ("plain", torch.float32)):
        inputs = [torch.tensor(each, dtype=kind, requires_grad=True) for each in given]
        result = theirs(*inputs)
        grad = numbers(*result.shape, seed=9)
        (result * torch.tensor(grad, dtype=kind)).sum().backward()
        found[name] = [result.detach().double().numpy(), *(each.grad.double().numpy() for each in inputs)]
    inputs = [Tensor(each) for each in given]
    result = ours(*inputs)
    made = (result * Tensor(grad)).sum().gradient(*inputs)
    near([result.numpy(), *(each.numpy() for each in made)], found["exact"], found["plain"])


def near(made: Sequence[Array], exact: Sequence[Array], plain: Sequence[Array]) -> None:
    for number, (a, b, c) in enumerate(zip(made, exact, plain, strict=True)):
        most = np.abs(b).max()
        assert np.abs(a - b).max() <= max(C * np.abs(c - b).max(), EPS * most), number


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys", "heads"), [(100, 130, 4), (64, 64, 2), (1, 70, 2)])
def test_flash_attention(causal: bool, rows: int, keys: int, heads: int) -> None:
    """Grouped queries, and blocks that reach beyond both axes; a query sees the keys up to its own place from
    the end."""
    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows) if causal else None
        k, v = (each.repeat_interleave(heads // 2, 1) for each in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    held(lambda q, k, v: stdlib.flash_attention_2(q, k, v, causal=causal), theirs,
         numbers(2, heads, rows, 32), numbers(2, 2, keys, 32, seed=1), numbers(2, 2, keys, 32, seed=2))


def test_flash_attention_with_another_schedule() -> None:
    """Odd blocks give the same numbers."""
    q, k, v = (Tensor(numbers(1, 2, 90, 16, seed=i)) for i in range(3))
    other = attention.forward.with_schedule(TileSchedule(block=(48, 24)))
    made = other(q, k, v, causal=True, scale=0.25)[0].numpy()
    np.testing.assert_allclose(made, stdlib.flash_attention_2(q, k, v, causal=True, scale=0.25).numpy(),
                               atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(37, 300), (2, 5, 64), (1, 7)], ids=str)
def test_layernorm(shape: tuple[int, ...]) -> None:
    """A mean of 5, whose square a sum of squares would lose."""
    n = shape[-1]
    held(stdlib.efficient_layernorm, lambda x, w, b: torch.nn.functional.layer_norm(x, (n,), w, b),
         numbers(*shape) + 5, numbers(n, seed=1), numbers(n, seed=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(37, 300), (3, 4, 65), (2, 1)], ids=str)
def test_softmax(shape: tuple[int, ...]) -> None:
    held(stdlib.stable_softmax, lambda x: x.softmax(-1), numbers(*shape) * 20)


def test_softmax_of_extremes() -> None:
    """The largest floats, rows of one value, and -inf beside a number."""
    rows = np.array([[3e38, 3e38, -3e38], [1e4, 1e4, 1e4], [-np.inf, 0, -np.inf], [-3e38, -3e38, -3e38]],
                    np.float32)
    np.testing.assert_allclose(stdlib.stable_softmax(Tensor(rows)).numpy(),
                               torch.tensor(rows).double().softmax(-1).numpy(), atol=1e-7)


def test_rotary_embedding() -> None:
    angles = numbers(50, 8, seed=3)
    cos, sin = np.cos(angles), np.sin(angles)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., :8], x[..., 8:]
        c, s = (torch.tensor(each, dtype=x.dtype) for each in (cos, sin))
        return torch.cat([a * c - b * s, b * c + a * s], -1)
    held(lambda x: stdlib.rotary_embedding(x, Tensor(cos), Tensor(sin)), theirs, numbers(2, 3, 50, 16))


def test_fused_adam() -> None:
    """Three steps of torch's AdamW, captured once: step is a Tensor."""
    start, grads = numbers(5, 77), [numbers(5, 77, seed=i) for i in (1, 2, 3)]
    weight = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    theirs = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    p, m, v, step = (Tensor(start).contiguous().realize(), Tensor.zeros(5, 77).contiguous().realize(),
                     Tensor.zeros(5, 77).contiguous().realize(), Tensor([0.0]).contiguous().realize())

    @TinyJit
    def update(g: Tensor) -> None:
        step.assign(step + 1)
        new = stdlib.fused_adam(p, g, m, v, lr=1e-2, step=step, weight_decay=0.1)
        for old, one in zip((p, m, v), new, strict=True): old.assign(one)
        Tensor.realize(p, m, v, step)
    for each in grads:
        weight.grad = torch.tensor(each, dtype=torch.float64)
        theirs.step()
        update(Tensor(each).realize())
    np.testing.assert_allclose(p.numpy(), weight.detach().numpy(), atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16])
def test_matmul_qint8(dtype: Any) -> None:
    """Beside the numbers that codes and scales stand for; in bfloat16 within its rounding of the result."""
    x, (codes, scale) = Tensor(numbers(2, 35, 90)).cast(dtype), stdlib.quantise_int8(Tensor(numbers(65, 90)))
    exact = x.float().numpy().astype(np.float64) @ (codes.numpy() * scale.numpy()[:,
                                                                                  None].astype(np.float64)).T
    made = stdlib.matmul_qint8(x, codes, scale).float().numpy()
    assert np.abs(made - exact).max() <= np.abs(exact).max() * (2.0**-8 if dtype == dtypes.bfloat16 else 1e-6)
    grad = stdlib.matmul_qint8(x, codes, scale).float().sum().gradient(x)[0].float().numpy()
    wanted = (codes.numpy() * scale.numpy()[:, None]).sum(0)
    assert np.abs(grad - wanted).max() <= np.abs(wanted).max() * (2.0**-6 if dtype == dtypes.bfloat16
                                                                  else 1e-5)
