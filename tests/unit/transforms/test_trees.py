"""Trees of Tensors: structure, order, equality, and classes that are registered."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from tinygrad import Tensor

from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms import flatten, grad, jit, map_tree, register_tree, vmap


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
X, Y = Tensor([1.0]), Tensor([2.0])


@pytest.mark.parametrize(("value", "count", "shown"), [
    (X, 1, "Tensor"), ([X, (Y, 3)], 2, "[Tensor, (Tensor, 3)]"), (None, 0, "None"), ((), 0, "()"),
    ({"b": X, "a": Y}, 2, "{a: Tensor, b: Tensor}"), (Pair(X, [Y]), 2, "Pair(a: Tensor, b: [Tensor])"),
    (State(X, 4), 1, "State(h: Tensor, step: 4)"), (Cache(X, Y, "here"), 2, "Cache(here: (Tensor, Tensor))")])
def test_leaves_and_back(value: Any, count: int, shown: str):
    leaves, tree = flatten(value)
    assert (len(leaves), tree.size, str(tree)) == (count, count, shown)
    again, same = flatten(tree.fill(leaves))
    assert same == tree
    assert hash(same) == hash(tree)
    assert all(a is b for a, b in zip(again, leaves, strict=True))
    assert type(tree.fill(leaves)) is type(value)


def test_what_is_equal():
    assert flatten({"a": X, "b": Y})[1] == flatten({"b": Y, "a": X})[1]
    assert [each is X for each in flatten({"b": Y, "a": X})[0]] == [True, False]
    assert flatten([X])[1] != flatten((X,))[1]
    assert flatten(1)[1] != flatten(True)[1]
    options = Options()
    assert flatten(options)[1].fill([]) is options
    with pytest.raises(TransformError, match="1 values for a tree of 2"): flatten([X, Y])[1].fill([X])


def test_mapped():
    assert map_tree(lambda a, b: a + b, {"a": X}, {"a": Y})["a"].item() == 3
    with pytest.raises(TransformError, match="a value beside it"): map_tree(lambda a, b: a, [X], (X,))


def test_registered_classes_in_transforms():
    def read(cache: Cache, q: Tensor) -> tuple[Tensor, Cache]:
        return (cache.K * cache.V * q).sum(), Cache(cache.K + 1, cache.V, cache.home)
    made = grad(lambda cache: read(cache, X)[0])(Cache(X, Y, "here"))
    assert (made.K.item(), made.V.item(), made.home) == (2, 1, "here")
    step, cache = jit(read), Cache(X, Y, "here")
    for i in range(4):
        total, cache = step(cache, X)
        assert (total.item(), cache.home) == (2 * (i + 1), "here")
    rows = vmap(read, (0, None))(Cache(Tensor([[1.0], [2.0]]), Tensor([[1.0], [1.0]]), "there"), X)
    assert (rows[0].tolist(), rows[1].K.tolist()) == ([1, 2], [[2], [3]])
