"""Compiled functions at the edges, as eager torch: indices out of range, NaN, infinities, equal elements."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tinygrad_nv.torch
from tinygrad_nv.errors import TorchError

INF, NAN = float("inf"), float("nan")
W = torch.arange(20.0).reshape(5, 4)
ROWS, COLUMNS = torch.tensor([0, 4]), torch.tensor([[0, 3]])


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="tinygrad_nv")


# **** indices ****

@pytest.mark.parametrize(("fn", "good", "bad", "words"), [
    (lambda i: F.embedding(i, W), ROWS, [0, 5], "embedding: an index is out of range, 0 to 4 of 5"),
    (lambda i: F.embedding(i, W), ROWS, [0, -1], "embedding"),
    (lambda i: W.gather(1, i), COLUMNS, [[0, 4]], "gather: an index is out of range, 0 to 3 of 4"),
    (lambda i: W[i] * 2, torch.tensor([4, -5]), [0, -6], "index: an index is out of range, -5 to 4 of 5"),
    (lambda i: W[:, i] * 2, torch.tensor([3, -4]), [4, 0], "index: an index is out of range, -4 to 3 of 4"),
    (lambda i: W.index_select(0, i), ROWS, [0, 5], "index_select"),
    (lambda i: W.index_add(0, i, W[:2]), ROWS, [0, 5], "index_put"),
    (lambda i: W.index_copy(0, i, W[:2]), ROWS, [0, 5], "index_copy"),
    (lambda i: W.index_put((i,), W[:2]), ROWS, [5, 0], "index_put"),
    (lambda i: W.scatter(1, i, W[:1, :2]), COLUMNS, [[0, 4]], "scatter"),
    (lambda i: W.scatter_add(1, i, W[:1, :2]), COLUMNS, [[0, 4]], "scatter_add"),
    (lambda i: F.cross_entropy(W / 20, i), torch.tensor([0, 3, -100, 1, 2]), [0, 3, 4, 1, 2], "gather")])
def test_an_index_out_of_range(fn, good, bad, words):
    made, bad = compiled(fn), torch.tensor(bad)
    torch.testing.assert_close(made(good), fn(good))
    with pytest.raises((IndexError, RuntimeError)): fn(bad)
    with pytest.raises(IndexError, match=words) as found: made(bad)
    assert isinstance(found.value, TorchError)
    torch.testing.assert_close(made(good), fn(good))    # the graph is still of use


def test_indices_unchecked(monkeypatch):
    monkeypatch.setenv("NV_TORCH_CHECK", "0")
    made = compiled(lambda i: F.embedding(i, W))
    assert made(torch.tensor([4, 5])).shape == (2, 4)
    assert tinygrad_nv.torch.explain(made, ROWS).whole


# **** NaN and order ****

X = torch.tensor([[1, NAN, 3, 2], [NAN, NAN, 1, 0], [0, 0, INF, -INF], [5, 5, 5, 5], [2, 1, 2, NAN],
                  [INF, INF, -INF, -INF], [-0.0, 0.0, 0.0, -0.0]])
INTS = [[0, 7, 1, 0, 7], [5, 5, 5, 5, 5], [3, 3, 2, 2, 1]]


def extremes(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.amax(1), x.amin((0, 1)), x.max(), *x.max(1), *x.min(1, keepdim=True), x.argmin(0), x.argmax()]


def orders(x: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.sort(x, dim=1, stable=True), *torch.sort(x, dim=0, descending=True, stable=True),
            x.topk(2, 1)[0]]


def others(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.flip(0)
    return [torch.linalg.vector_norm(x, INF, 1), torch.linalg.vector_norm(x, -INF, 1), x.norm(),
            x.clamp(-1, 2), torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), F.relu(x),
            x.clamp(min=y), x.cummax(1)[0]]


def same(own: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(own, want, strict=True): torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(each, marks=SLOW) for each in
                                                    (torch.float16, torch.bfloat16, torch.float64))])
def test_NaN_wins(dtype):
    for fn in (extremes, orders, others)[:3 if dtype == torch.float32 else 2]:
        same(compiled(fn)(X.to(dtype)), fn(X.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.int8, *(pytest.param(each, marks=SLOW) for each in
                                                 (torch.uint8, torch.int16, torch.int32, torch.int64))])
def test_integers(dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([*INTS, [info.min, info.max, 0, info.min, info.max]], dtype=dtype)
    for fn in (extremes, orders): same(compiled(fn)(x), fn(x))


def test_booleans():
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [*torch.sort(x, dim=1, stable=True), x.amax(1), *x.max(1)]
    x = torch.tensor(INTS) > 2
    same(compiled(fn)(x), fn(x))


def test_windows_and_thresholds_of_NaN():
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        pooled = F.max_pool2d(x, 2, return_indices=True)
        return [values, places, F.max_unpool2d(*pooled, 2), F.max_pool1d(x[0], 2), x.argmax(), x * 0,
                x.argmin(keepdim=True), F.softshrink(x), F.hardshrink(x), F.threshold(x, 0.1, 5.0)]
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 1, 1] = x[0, 0, 1, 2] = x[0, 1, 0, 0] = NAN
    x[0, 1, 7, 7], x[0, 0, 4:6, 4:6] = INF, -INF
    same(compiled(fn)(x), fn(x))
    adaptive = lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True)  # noqa: E731
    same(compiled(adaptive)(x), adaptive(x))
