"""Captured steps and loops: the same as without, results that stay, how often Python runs, and under
transforms."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes

from tests.support.transforms.transform_case import close, random
from tinygrad_nv.numerics.policy import deterministic
from tinygrad_nv.transforms import autodiff, checkpoint, grad, jit, scan, vmap

W = random(3, 3)


# **** jit ****

def test_results_are_values_of_their_own():
    calls = []

    @jit
    def fn(x: Tensor, y: dict[str, Tensor], k: int = 2) -> dict[str, Any]:
        calls.append(k)
        return {"a": x * y["y"] + k, "b": [y["y"].sum(), None], "name": "fn"}
    x, kept = Tensor([1.0, 2, 3, 4]), []
    for i in range(5): kept.append(fn(x, {"y": Tensor.full((4,), float(i))}))
    for i, each in enumerate(kept): np.testing.assert_array_equal(each["a"].numpy(), x.numpy() * i + 2)
    assert (calls, kept[3]["name"], kept[3]["b"][0].item(), kept[3]["b"][1]) == ([2, 2], "fn", 12.0, None)
    assert fn.__name__ == "fn"


def test_what_was_captured_outside_of_deterministic_is_not_replayed_inside():
    x, w = random(64, 1500), random(1500, 40)
    product = jit(lambda x: x @ w)
    def first(rows: int) -> np.ndarray: return product(x[:rows].clone().realize()).numpy()[0]
    for _ in range(3): outside = first(1)
    with deterministic():
        for _ in range(3): assert (first(1) == first(64)).all()
        inside = first(1)
    assert (first(1) == outside).all()
    assert (inside != outside).any()


def test_other_arguments_are_other_captures():
    calls = []

    @jit
    def fn(x: Tensor, k: Any) -> Tensor:
        calls.append(k)
        return x * k
    for _ in range(3):
        assert fn(Tensor([2.0]), 1).tolist() == [2]
        assert fn(Tensor([2.0]), True).tolist() == [2]
        assert fn(Tensor([2.0, 3]), 1).tolist() == [2, 3]
        assert fn(Tensor([2], dtype=dtypes.int), 1).dtype == dtypes.int
    assert len(calls) == 8


def test_arguments_of_all_kinds():
    same = jit(lambda x, y: (x, x + y, Tensor(7.0)))
    x = random(4).realize()
    for i in range(4):
        a, b, c = same(x + i, x[1:2])       # a view, a graph
        close(b, x.numpy() + i + x.numpy()[1], rtol=1e-6)
        close(a, x.numpy() + i, rtol=1e-6)
        assert c.item() == 7
        assert jit(lambda a, b: a * b)(x, x).shape == (4,)
        assert same(Tensor(2.0), Tensor(3.0))[1].item() == 5     # numbers
    constant = jit(lambda x: Tensor(3.0))
    for _ in range(3): assert constant(x).item() == 3


def test_state_that_is_assigned():
    count = Tensor.zeros(1).contiguous().realize()
    step = jit(lambda x: count.assign(count + x))
    seen = [step(Tensor([2.0])) for _ in range(4)]
    assert [each.item() for each in seen] == [2, 4, 6, 8]


def test_inside_of_transforms_and_captures():
    inner = jit(lambda x: (x @ W).tanh())
    x = random(4, 3)
    want = grad(lambda x: (x @ W).tanh().sum())(x).numpy()
    close(grad(lambda x: inner(x).sum())(x), want, rtol=1e-6)
    close(vmap(inner)(x), (x @ W).tanh())
    outer = jit(lambda x: inner(x) + 1)
    for _ in range(3): close(outer(x), (x @ W).tanh().numpy() + 1)


def test_methods():
    class Model:
        def __init__(self) -> None: self.w = W

        @jit
        def __call__(self, x: Tensor) -> Tensor: return x @ self.w
    model, x = Model(), random(2, 3)
    for _ in range(3): close(model(x), (x @ W))


@pytest.mark.slow
def test_training_with_autodiff():
    @jit
    @autodiff
    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor: return ((x @ p["w"]).tanh() ** 2).mean()
    p, x = {"w": W}, random(5, 3)
    tw = torch.tensor(W.numpy(), requires_grad=True)
    for _ in range(4):
        value, found = loss.value_and_grad(p, x)
        want = ((torch.tensor(x.numpy()) @ tw).tanh() ** 2).mean()
        tg, = torch.autograd.grad(want, tw)
        assert value.item() == pytest.approx(want.item(), rel=1e-5)
        close(found["w"], tg, rtol=1e-4, atol=1e-6)
        p = {"w": p["w"] - 0.5 * found["w"]}
        tw = (tw - 0.5 * tg).detach().requires_grad_()
    assert loss(p, x).shape == ()
    assert loss.grad(p, x)["w"].shape == (3, 3)
    assert loss.vjp(p, x)[0].shape == ()
    assert {type(loss.grad), type(loss.value_and_grad)} == {jit}
    with pytest.raises(AttributeError, match="a function under jit has no hessian"): _ = loss.hessian


def test_autodiff_options():
    @autodiff(argnums=(0, 1), has_aux=True)
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, int]: return (x * y).sum(), 3
    (value, aux), (gx, gy) = fn.value_and_grad(Tensor([2.0]), Tensor([5.0]))
    assert (value.item(), aux, gx.tolist(), gy.tolist()) == (10, 3, [5], [2])
    assert fn(Tensor([2.0]), Tensor([5.0]))[1] == 3
    square = autodiff(lambda x: x * x)
    assert square.jvp((Tensor(3.0),), (Tensor(1.0),))[1].item() == 6
    assert square.vjp(Tensor(3.0))[1](Tensor(1.0))[0].item() == 6


# **** scan ****

def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    new = (h @ W + x).tanh()
    return new, new * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_loop(steps: int, reverse: bool):
    xs, h = random(steps, 2, 3), Tensor.zeros(2, 3)
    last, ys = scan(cell, h, xs, reverse=reverse)
    want, rows = np.zeros((2, 3), np.float32), {}
    for i in range(steps)[::-1] if reverse else range(steps):
        want = np.tanh(want @ W.numpy() + xs.numpy()[i])
        rows[i] = want * 2
    close(last, want)
    close(ys, np.stack([rows[i] for i in range(steps)]))
    for own, other in zip(scan(cell, h, xs, reverse=reverse, unroll=True), (last, ys), strict=True):
        close(own, other, rtol=1e-6)


def test_one_body_is_captured():
    calls = []

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        calls.append(1)
        return c * 0.5 + x, None
    last, ys = scan(body, Tensor([0.0]), random(50, 1))
    assert (len(calls), ys, last.shape) == (3, None, (1,))


def test_carries_that_change_places():
    last, seen = scan(lambda c, _: ({"a": c["b"], "b": c["a"] + c["b"]}, c["a"]),
                      {"a": Tensor(0.0), "b": Tensor(1.0)}, length=10)
    assert seen.tolist() == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
    assert (last["a"].item(), last["b"].item()) == (55, 89)


def test_the_first_carry_stays():
    init = Tensor([1.0, 2.0]).realize()
    scan(lambda c, _: (c * 2, c), init, length=5)
    assert init.tolist() == [1, 2]


def test_gradients_of_a_scan_are_torchs():
    xs, tw = random(6, 2, 3), torch.tensor(W.numpy(), requires_grad=True)

    def loss(w: Tensor) -> Tensor:
        last, ys = scan(lambda h, x: ((h @ w + x).tanh(), (h * h).sum()), Tensor.zeros(2, 3), xs)
        return last.sum() + ys.sum()
    h, total = torch.zeros(2, 3), torch.tensor(0.0)
    for i in range(6): h, total = (h @ tw + torch.tensor(xs.numpy()[i])).tanh(), total + (h * h).sum()
    (h.sum() + total).backward()
    close(grad(loss)(W), tw.grad, rtol=1e-4, atol=1e-5)
    step = jit(grad(loss))
    for _ in range(3): close(step(W), tw.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_scan_of_batches_and_in_captures():
    xs = random(4, 5, 2, 3)
    def last(xs: Tensor) -> Tensor: return scan(cell, Tensor.zeros(2, 3), xs)[0]
    want = np.stack([last(xs[i]).numpy() for i in range(4)])
    close(vmap(last)(xs), want)
    step = TinyJit(lambda x: last(x).realize())
    for _ in range(3): close(step(xs[1].contiguous().realize()), want[1], rtol=1e-5)


# **** checkpoint ****

@pytest.mark.slow
def test_checkpoints_in_transforms():
    plain, x = (lambda x: (x @ W).tanh()), random(4, 3)
    kept = checkpoint(plain)
    def loss(fn: Any) -> Any: return lambda x: (fn(x) ** 2).sum()
    close(grad(loss(kept))(x), grad(loss(plain))(x), rtol=1e-6)
    close(vmap(grad(loss(kept)))(x), vmap(grad(loss(plain)))(x), rtol=1e-5)
    twice = [grad(lambda x, fn=fn: (grad(loss(fn))(x) ** 2).sum())(x).numpy() for fn in (kept, plain)]
    close(*twice, rtol=1e-4, atol=1e-5)
