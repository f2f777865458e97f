"""Functions with derivatives of their own: that the rule is used, in each transform, and only where it
should be. Trees of Tensors: structure, order, equality, and classes that are registered."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from tinygrad import Tensor, dtypes

from tests.support.transforms.transform_case import close
from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms import (
    custom_jvp,
    custom_vjp,
    custom_vmap,
    flatten,
    grad,
    jit,
    jvp,
    map_tree,
    register_tree,
    value_and_grad,
    vjp,
    vmap,
)

X = Tensor([0.5, -1.0, 2.0]).realize()


@custom_vjp
def scaled(x: Tensor) -> Tensor:
    """2 x, with a gradient that says 10 x."""
    return x * 2


scaled.defvjp(lambda x: (x * 2, x), lambda x, u: (10 * x * u,))


def test_the_rule_is_used():
    value, found = value_and_grad(lambda x: scaled(x).sum())(X)
    assert (value.item(), found.tolist()) == (3.0, [5, -10, 20])
    assert scaled.__name__ == "scaled"


def test_the_rule_in_other_transforms():
    ones = Tensor.ones(3)
    assert jvp(scaled, (X,), (ones,))[1].tolist() == [5, -10, 20]
    assert vjp(scaled, X)[1](ones)[0].tolist() == [5, -10, 20]
    assert grad(lambda x: grad(lambda x: scaled(x).sum())(x).sum())(X).tolist() == [10, 10, 10]
    rows = Tensor.stack(X, X * 2)
    assert vmap(grad(lambda x: scaled(x).sum()))(rows).tolist() == [[5, -10, 20], [10, -20, 40]]
    assert grad(lambda x: vmap(scaled)(x).sum())(rows).tolist() == [[5, -10, 20], [10, -20, 40]]
    step = jit(grad(lambda x: scaled(x).sum()))
    for _ in range(3): assert step(X).tolist() == [5, -10, 20]


def test_several_arguments_results_and_residuals():
    @functools.partial(custom_vjp, nondiff_argnums=(0,))
    def both(axis: int, x: Tensor, p: dict[str, Tensor], n: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(axis) * p["w"], x * 3
    both.defvjp(lambda axis, x, p, n: ((x.sum(axis) * p["w"], x * 3), {"x": x, "w": p["w"]}),
                lambda axis, kept, u: (kept["w"] * u[0].unsqueeze(axis) + 3 * u[1],
                                       {"w": (kept["x"].sum(axis) * u[0]).sum()}, None))
    x, w, n = Tensor([[1.0, 2], [3, 4]]), Tensor(2.0), Tensor([1])

    def loss(x: Tensor, w: Tensor) -> Tensor:
        a, b = both(1, x, {"w": w}, n)
        return (a * a).sum() + b.sum()

    def plain(x: Tensor, w: Tensor) -> Tensor: return ((x.sum(1) * w) ** 2).sum() + (x * 3).sum()
    for own, other in zip(grad(loss, (0, 1))(x, w), grad(plain, (0, 1))(x, w), strict=True):
        close(own, other, rtol=1e-6)


def test_gradients_that_are_clipped():
    @custom_vjp
    def clipped(x: Tensor) -> Tensor: return x
    clipped.defvjp(lambda x: (x, None), lambda _, u: (u.clip(-1, 1),))
    assert grad(lambda x: (clipped(x) * Tensor([3.0, 0.5, -7])).sum())(X).tolist() == [1, 0.5, -1]


def test_straight_through_of_a_step():
    @custom_vjp
    def rounded(x: Tensor) -> Tensor: return x.round()
    rounded.defvjp(lambda x: (x.round(), None), lambda _, u: (u,))
    assert grad(lambda x: (rounded(x) * x).sum())(Tensor([1.2, 2.7])).numpy() == pytest.approx([2.2, 5.7])


def test_integers_have_no_gradient():
    @custom_vjp
    def counted(x: Tensor) -> tuple[Tensor, Tensor]: return x * 2, (x > 0).cast(dtypes.int)
    counted.defvjp(lambda x: (counted.fn(x), None), lambda _, u: (u[0] * 7,))
    assert grad(lambda x: (counted(x)[0] * counted(x)[1]).sum())(X).tolist() == [7, 0, 7]


def test_custom_jvp_in_both_directions():
    @custom_jvp
    def f(x: Tensor, y: Tensor) -> Tensor: return x.exp() * y
    f.defjvp(lambda p, t: (p[0].exp() * p[1], 3 * p[0].exp() * p[1] * t[0] + 5 * t[1]))
    y = Tensor([1.0, 2, 3])
    close(jvp(f, (X, y), (y, X))[1], (3 * X.exp() * y * y + 5 * X), rtol=1e-6)
    gx, gy = grad(lambda x, y: f(x, y).sum(), (0, 1))(X, y)
    close(gx, (3 * X.exp() * y), rtol=1e-6)
    assert gy.tolist() == [5, 5, 5]
    close(vmap(jvp_of(f, y))(Tensor.stack(X, X)).numpy()[1],
                               (3 * X.exp() * y * X).numpy(), rtol=1e-6)


def jvp_of(f, y):
    """J x at (x, y), as a function of x."""
    return lambda x: jvp(lambda x: f(x, y), (x,), (x,))[1]


def test_what_is_the_same_for_all_examples_gets_the_sum():
    @custom_vjp
    def times(x: Tensor, w: Tensor) -> Tensor: return x * w
    times.defvjp(lambda x, w: (x * w, (x, w)), lambda kept, u: (kept[1] * u, 7 * kept[0] * u))
    rows, w = Tensor.stack(X, X * 2), Tensor([1.0, 2, 3])
    close(grad(lambda w: vmap(times, (0, None))(rows, w).sum())(w), 7 * rows.sum(0))
    close(vmap(grad(lambda x, w: times(x, w).sum(), 1), (0, None))(rows, w), 7 * rows)


# **** batches ****

def test_a_kernel_that_is_called_once_for_all_examples():
    calls = list[tuple[int, ...]]()

    @custom_vmap
    def outside(x: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Something that vmap does not look into: it writes memory."""
        calls.append(x.shape)
        out = Tensor.zeros(*x.shape).contiguous()
        return out.assign(x * p["w"]), x.sum(-1)

    def rule(n: int, batched: Any, x: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert (n, batched) == (2, (True, {"w": False}))
        return outside.fn(x, p)
    outside.defvmap(rule)
    rows, w = Tensor.stack(X, X * 2).realize(), Tensor([1.0, 10, 100])
    made, sums = vmap(lambda x: outside(x, {"w": w}))(rows)
    close(made, rows * w)
    close(sums, rows.sum(1))
    assert calls[-1] == (2, 3)
    assert outside(X, {"w": w})[0].shape == (3,)
    plain = custom_vmap(lambda x: x.sin())
    plain.defvmap(lambda n, batched, x: x.sin())
    close(grad(lambda x: vmap(plain)(x).sum())(rows), rows.cos())
    close(vmap(grad(lambda x: plain(x).sum()))(rows), rows.cos())
    assert vmap(lambda x, y: (x, plain(y)), (0, None))(rows, X)[1].shape == (2, 3)


class Pair(NamedTuple):
    """A named tuple."""
    a: Any
    b: Any


@dataclass(frozen=True)
class State:
    """A dataclass with a Tensor and a number."""
    h: Tensor
    step: int


@dataclass
class Options:
    """A dataclass without Tensors is kept as it is."""
    rate: float = 0.1


class Cache:
    """A class of its own."""
    def __init__(self, K: Tensor, V: Tensor, home: str) -> None: self.K, self.V, self.home = K, V, home


register_tree(Cache, lambda one: ((one.K, one.V), one.home), lambda inside, home: Cache(*inside, home))
Z, Y = Tensor([1.0]), Tensor([2.0])


@pytest.mark.parametrize(("value", "count", "shown"), [
    (Z, 1, "Tensor"), ([Z, (Y, 3)], 2, "[Tensor, (Tensor, 3)]"), (None, 0, "None"), ((), 0, "()"),
    ({"b": Z, "a": Y}, 2, "{a: Tensor, b: Tensor}"), (Pair(Z, [Y]), 2, "Pair(a: Tensor, b: [Tensor])"),
    (State(Z, 4), 1, "State(h: Tensor, step: 4)"), (Cache(Z, Y, "here"), 2, "Cache(here: (Tensor, Tensor))")])
def test_leaves_and_back(value: Any, count: int, shown: str):
    leaves, tree = flatten(value)
    assert (len(leaves), tree.size, str(tree)) == (count, count, shown)
    again, same = flatten(tree.fill(leaves))
    assert same == tree
    assert hash(same) == hash(tree)
    assert all(a is b for a, b in zip(again, leaves, strict=True))
    assert type(tree.fill(leaves)) is type(value)


def test_what_is_equal():
    assert flatten({"a": Z, "b": Y})[1] == flatten({"b": Y, "a": Z})[1]
    assert [each is Z for each in flatten({"b": Y, "a": Z})[0]] == [True, False]
    assert flatten([Z])[1] != flatten((Z,))[1]
    assert flatten(1)[1] != flatten(True)[1]
    options = Options()
    assert flatten(options)[1].fill([]) is options
    with pytest.raises(TransformError, match="1 values for a tree of 2"): flatten([Z, Y])[1].fill([Z])


def test_mapped():
    assert map_tree(lambda a, b: a + b, {"a": Z}, {"a": Y})["a"].item() == 3
    with pytest.raises(TransformError, match="a value beside it"): map_tree(lambda a, b: a, [Z], (Z,))


def test_registered_classes_in_transforms():
    def read(cache: Cache, q: Tensor) -> tuple[Tensor, Cache]:
        return (cache.K * cache.V * q).sum(), Cache(cache.K + 1, cache.V, cache.home)
    made = grad(lambda cache: read(cache, Z)[0])(Cache(Z, Y, "here"))
    assert (made.K.item(), made.V.item(), made.home) == (2, 1, "here")
    step, cache = jit(read), Cache(Z, Y, "here")
    for i in range(4):
        total, cache = step(cache, Z)
        assert (total.item(), cache.home) == (2 * (i + 1), "here")
    rows = vmap(read, (0, None))(Cache(Tensor([[1.0], [2.0]]), Tensor([[1.0], [1.0]]), "there"), Z)
    assert (rows[0].tolist(), rows[1].K.tolist()) == ([1, 2], [[2], [3]])
