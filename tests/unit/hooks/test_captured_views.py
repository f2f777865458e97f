"""Captured functions whose arguments are parts of a larger Tensor, at another place in each call."""
from __future__ import annotations

import re

import numpy as np
import pytest
from tinygrad import Context, Tensor, TinyJit, dtypes
from tinygrad.engine import jit as tinygrads
from tinygrad.engine.jit import JitError

from tinygrad_nv import hooks
from tinygrad_nv.transforms import jit, value_and_grad

N = np.arange(32, dtype=np.float32).reshape(8, 4)
X = Tensor(N).realize()
COPIES = {"rows": (lambda x, i: x[i:i + 1].contiguous(), lambda i: N[i]),
          "realized": (lambda x, i: x[i:i + 2].contiguous().realize(), lambda i: N[i:i + 2]),
          "row": (lambda x, i: x[i].contiguous(), lambda i: N[i]),
          "chunk": (lambda x, i: x.chunk(8)[i].contiguous(), lambda i: N[i]),
          "shrunk": (lambda x, i: x.shrink(((i, i + 1), None)).contiguous(), lambda i: N[i])}
VIEWS = {"rows": (lambda x, i: x[i:i + 1], lambda i: N[i:i + 1]),
         "column": (lambda x, i: x[:, i % 4], lambda i: N[:, i % 4]),
         "reshaped": (lambda x, i: x.reshape(4, 8)[i % 4, 2:6], lambda i: N.reshape(4, 8)[i % 4, 2:6]),
         "expanded": (lambda x, i: x[i, :1].expand(3), lambda i: N[i, :1].repeat(3)),
         "bits": (lambda x, i: x[i].bitcast(dtypes.int), lambda i: N[i].view(np.int32))}


def figures(x: Tensor) -> Tensor: return x.sum() + x.max()


@pytest.mark.parametrize("name", COPIES)
def test_parts_made_contiguous(name):
    part, want = COPIES[name]
    for step in (jit(figures), TinyJit(lambda x: figures(x).realize())):
        assert [step(part(X, i)).item() for i in range(5)] \
            == [want(i).sum() + want(i).max() for i in range(5)]


@pytest.mark.parametrize("name", VIEWS)
def test_jit_takes_any_view(name):
    (part, want), step = VIEWS[name], jit(lambda x: (x + 1, x))
    for i in range(4):
        for own, more in zip(step(part(X, i)), (1, 0), strict=True):
            np.testing.assert_array_equal(own.numpy(), want(i) + want(i).dtype.type(more))


def test_two_parts_of_one_tensor_and_parts_in_containers():
    less, inside = jit(lambda a, b: a - b), TinyJit(lambda given: (given[0] * 2).realize())
    for i in range(5):
        np.testing.assert_array_equal(less(X[i:i + 1].contiguous(), X[7 - i]).numpy(), N[i:i + 1] - N[7 - i])
        np.testing.assert_array_equal(inside([X[i].contiguous()]).numpy(), N[i] * 2)


def test_a_part_is_read_as_it_is_at_the_call():
    whole, step = X.clone().realize(), jit(figures)
    for i in range(4):
        part = whole[i:i + 1]
        whole[i:i + 1].assign(Tensor.full((1, 4), 10.0 + i).contiguous()).realize()
        assert step(part).item() == 5 * (10 + i)


@pytest.mark.parametrize("name", VIEWS)
def test_TinyJit_takes_views_that_move(name):
    (part, want), step = VIEWS[name], TinyJit(lambda x: (x + 1).realize())
    for i in range(4):
        np.testing.assert_array_equal(step(part(X, i)).numpy(), want(i) + want(i).dtype.type(1))


@pytest.mark.parametrize("level", [1, 2])
def test_views_that_move_by_position_by_name_and_in_containers(level):
    other = Tensor(-N).realize()
    step = TinyJit(lambda given, named, *, x: (given[0] + 2 * given[1] + 4 * named["y"] + 8 * x).realize())
    with Context(JIT=level):
        for i in (0, 3, 5, 1):
            # views of one Tensor, one that stays, and one of another
            got = step([X[i], X[7 - i]], {"y": X[2]}, x=other[i])
            np.testing.assert_array_equal(got.numpy(), N[i] + 2 * N[7 - i] + 4 * N[2] - 8 * N[i])


@pytest.mark.parametrize("first", [2, 3])
def test_writes_into_views_reach_the_whole(first):
    whole, step = Tensor.zeros(8, 4).clone().realize(), TinyJit(lambda x, y: x.assign(x + y.sum()).realize())
    places = [2, first, first, 5 if first == 3 else 2, 6 if first == 3 else 2]
    want = np.zeros((8, 4), np.float32)
    for i, place in enumerate(places):
        step(whole[place:place + 1], X[i])
        want[place] += N[i].sum()
    np.testing.assert_array_equal(whole.numpy(), want)


def test_training_over_mini_batches():
    w, step = Tensor([[1.0], [2], [0], [1]]), jit(value_and_grad(lambda w, x: ((x @ w) ** 2).mean()))
    for i in range(4):
        value, found = step(w, X[2 * i:2 * i + 2].contiguous())
        x = N[2 * i:2 * i + 2].astype(np.float64)
        y = x @ w.numpy()
        np.testing.assert_allclose(value.item(), (y ** 2).mean(), rtol=1e-5)
        np.testing.assert_allclose(found.numpy(), x.T @ y, rtol=1e-5)    # 2 / n of two rows is 1


ONES = Tensor.ones(4).clone().realize()


@pytest.mark.parametrize(("first", "others", "words"), [
    (ONES, (Tensor.ones(8).clone(),),
     "argument 0 than it has captured: shape (4,) then, (8,) now; give Tensors of one shape"),
    (ONES, (ONES.half(),), "dtype dtypes.float then, dtypes.half now"),
    (X[0], (X[1],), "a view of another place of a larger Tensor; give Tensors of one shape"),
    (X, (X.reshape(4, 8),), "shape (8, 4) then, (4, 8) now"),
    (ONES, (ONES, X), "captured the arguments [0], and is called with [0, 1]: give the same ones")])
def test_TinyJit_says_what_differs(first, others, words):
    step = TinyJit(lambda x, y=None: (x * 2).sum().realize())
    for _ in range(3): step(first)
    with pytest.raises(JitError, match=re.escape(words)): step(*others)


def test_put_back_it_is_tinygrads():
    hooks.remove_captures()
    try:
        step = TinyJit(lambda x: (x * 2).sum().realize())
        assert [step(X[i].contiguous()).item() for i in range(3)] == [12, 44, 44]    # 76 would be right
        assert tinygrads._prepare_jit_inputs.__module__ == "tinygrad.engine.jit"
    finally: hooks.install_captures()
