"""Transforms: functions and arguments that they cannot take, each with what was found and what to do."""
from __future__ import annotations

from typing import Any

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms import (
    custom_jvp,
    custom_vjp,
    custom_vmap,
    grad,
    jacrev,
    jit,
    jvp,
    scan,
    vjp,
    vmap,
)

X = Tensor([[1.0, 2, 3], [4, 5, 6]])
INTS = Tensor([1, 2])


def total(x: Tensor) -> Tensor: return x.sum()


@custom_vjp
def ruleless(x: Tensor) -> Tensor: return x


@custom_vjp
def short(x: Tensor, y: Tensor) -> Tensor: return x * y


@custom_vjp
def wide(x: Tensor) -> Tensor: return x


@custom_vjp
def alone(x: Tensor) -> Tensor: return x


@custom_vjp
def squared(x: Tensor) -> Tensor: return x


@custom_jvp
def single(x: Tensor) -> Tensor: return x


@custom_vmap
def unsaid(x: Tensor) -> Tensor: return x


@custom_vmap
def narrow(x: Tensor) -> Tensor: return x


@custom_vmap
def twice(x: Tensor) -> Tensor: return x


narrow.defvmap(lambda n, batched, x: x.sum(1))
twice.defvmap(lambda n, batched, x: (x, x))
short.defvjp(lambda x, y: (x * y, None), lambda _, u: (u,))
wide.defvjp(lambda x: (x, None), lambda _, u: (u.sum(),))
alone.defvjp(lambda x: x, lambda _, u: (u,))
squared.defvjp(lambda x: (x, None), lambda _, u: (u * u,))
single.defjvp(lambda p, t: p[0])


CASES: list[tuple[Any, tuple[str, ...]]] = [
    # derivatives
    (lambda: grad(lambda x: x * 2)(X), ("grad of a function that returns dtypes.float (2, 3)",
                                        "one float of shape ()", "sum() or mean() the result, or use vjp")),
    (lambda: grad(lambda x: (x.sum(), x.sum()))(X), ("returns dtypes.float (), dtypes.float ()",)),
    (lambda: grad(lambda x: x.sum().cast(dtypes.int))(X), ("returns dtypes.int ()",)),
    (lambda: grad(lambda x: 3)(X), ("grad of a function that returns 3", "expected: Tensors")),
    (lambda: grad(total)(INTS), ("grad by argument 0, which has a Tensor of dtypes.int", "floats",
                                 "leave the argument out of argnums, or cast it")),
    (lambda: grad(total, 2)(X), ("grad by argument 2 of 1", "the number of an argument")),
    (lambda: grad(total, has_aux=True)(X), ("with has_aux=True of a function that returns Tensor", "a pair")),
    (lambda: grad(lambda x: x.sum() * float(x.max().item()))(X),
     ("a value is read in a function under grad", "a graph that depends on shapes alone", "or use where()")),
    (lambda: vmap(lambda x: x * x.tolist()[0])(X), ("a value is read in a function under vmap",)),
    (lambda: vjp(total, X)[1](X), ("a cotangent of shape (2, 3)", "expected: ()")),
    (lambda: vjp(total, X)[1]([Tensor(1.0)]), ("a cotangent is [Tensor]", "expected: Tensor")),
    (lambda: jvp(total, (X,), (X[0],)), ("a tangent of shape (3,)", "(2, 3)")),
    (lambda: jvp(total, (X,), ()), ("jvp with 1 primals and 0 tangents", "as many")),
    (lambda: jvp(squared, (X,), (X,)), ("a gradient that is not linear", "linear in its cotangent")),
    (lambda: jacrev(total)([X]), ("by argument 0, a list", "a Tensor")),
    (lambda: jacrev(lambda x: [x])(X), ("in a matrix of a list", "a function that returns a Tensor")),
    # derivatives that are given
    (lambda: ruleless(X), ("ruleless without a rule", "a rule before a call: .defvjp(…)")),
    (lambda: short(X, y=X), ("short with y by name", "arguments by position")),
    (lambda: grad(lambda x: short(x, x).sum())(X), ("the rule of short returns 1", "a tuple of 2")),
    (lambda: grad(lambda x: wide(x).sum())(X), ("a gradient of wide of shape ()", "(2, 3), the argument's")),
    (lambda: grad(lambda x: alone(x).sum())(X), ("the forward rule of alone returns a Tensor",
                                                 "a pair: the result, and residuals")),
    (lambda: grad(lambda x: single(x).sum())(X), ("the rule of single returns a Tensor",
                                                  "a pair: the result, and its tangent")),
    # batches
    (lambda: vmap(total, (0, 0))(X), ("in_axes of 2 axes for 1 arguments", "one for each argument")),
    (lambda: vmap(total, None)(X), ("none has an axis of examples", "at least one")),
    (lambda: vmap(total, 2)(X), ("axis 2 of a Tensor of shape (2, 3)", "an axis that it has")),
    (lambda: vmap(lambda x, y: x)(X, X.T),
     ("different sizes: 2 (of a Tensor of shape (2, 3)) and 3 (of a Tensor of shape (3, 2))",
      "one number of examples")),
    (lambda: vmap(total, ({"a": 0},))(X), ("in_axes {'a': 0} for Tensor", "or the same structure")),
    (lambda: vmap(lambda x: x, 0, None)(X), ("out_axes None for a result that depends on the example",)),
    (lambda: vmap(lambda x: Tensor.zeros(3).clone().assign(x))(X),
     ("vmap of a function with an assignment", "a pure function of tinygrad's operations",
      "give what it makes as an argument, or say how it is batched: custom_vmap")),
    (lambda: vmap(unsaid)(X), ("unsaid without a rule", ".defvmap(…)")),
    (lambda: vmap(narrow)(X), ("a batch of narrow of shape (2,)", "expected: (2, 3)")),
    (lambda: vmap(twice)(X), ("the batch of twice is (Tensor, Tensor)", "expected: Tensor")),
    # captures
    (lambda: jit(total)(X, [{1}]), ("jit of total with an argument that has no hash",
                                    "give arrays as Tensors")),
    # loops
    (lambda: scan(lambda c, x: (c, x), X), ("scan without xs and without length", "one of them")),
    (lambda: scan(lambda c, x: (c, x), X, X, 3), ("scan of 2 and 3 steps",
                                                  "one number of steps, at least 1")),
    (lambda: scan(lambda c, x: (c, x), X, length=0), ("scan of 0 steps",)),
    (lambda: scan(lambda c, x: (c, x), X, Tensor(1.0)), ("scan over a Tensor of shape ()", "[length, …]")),
    (lambda: scan(lambda c, x: c, X, X), ("scan of a body that returns Tensor", "a pair: the carry, and y")),
    (lambda: scan(lambda c, x: ([c], x), X, X), ("scan whose carry becomes [Tensor]", "expected: Tensor")),
    (lambda: scan(lambda c, x: (c.sum(), x), X, X), ("scan whose carry of dtypes.float (2, 3) becomes "
                                                     "dtypes.float ()", "the same shape and dtype",
                                                     "cast what the body returns"))]


@pytest.mark.parametrize(("call", "words"), CASES, ids=[words[0] for _, words in CASES])
def test_a_transform_that_cannot_be(call: Any, words: tuple[str, ...]):
    with pytest.raises(TransformError) as error: call()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_all_is_as_before_after_an_error():
    with pytest.raises(TransformError): grad(lambda x: x.sum() * x.max().item())(X)
    assert grad(total)(X).tolist() == [[1, 1, 1]] * 2
    assert (X + 1).realize().uop.is_realized
