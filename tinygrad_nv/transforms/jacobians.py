"""Matrices of derivatives: `jacrev`, `jacfwd` and `hessian`, by batched products with unit vectors (vmap)."""
from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms.gradients import jvp, vjp
from tinygrad_nv.transforms.tracing import concrete
from tinygrad_nv.transforms.vmap import move_axis, vmap

Fn = Callable[..., Any]


def jacrev(fn: Fn, argnum: int = 0) -> Fn:
    """A function of the same arguments: ∂fn/∂(argument argnum), [*shape of fn's result, *shape of the
    argument]. One reverse pass for each element of the result, all at once. Raises `TransformError`."""
    @functools.wraps(fn)
    def call(*args: Any) -> Tensor:
        x, of = _one(fn, args, argnum)
        out, pull = vjp(of, x)
        rows = vmap(lambda u: pull(u)[0])(_units(_tensor(out)))
        return rows.reshape(*out.shape, *x.shape)
    return call


def jacfwd(fn: Fn, argnum: int = 0) -> Fn:
    """The same by forward mode: one pass for each element of the argument, all at once. Raises
    `TransformError`."""
    @functools.wraps(fn)
    def call(*args: Any) -> Tensor:
        x, of = _one(fn, args, argnum)
        columns = vmap(lambda v: _tensor(jvp(of, (x,), (v,))[1]))(_units(concrete(x)))
        return move_axis(columns, 0, -1).reshape(*columns.shape[1:], *x.shape)
    return call


def hessian(fn: Fn, argnum: int = 0) -> Fn:
    """∂²fn/∂x∂x of a function with a scalar result: [*shape of x, *shape of x]. Raises `TransformError`."""
    return jacfwd(jacrev(fn, argnum), argnum)


def _one(fn: Fn, args: tuple[Any, ...], argnum: int) -> tuple[Tensor, Fn]:
    """The argument, and the function of it alone."""
    if not isinstance(x := args[argnum], Tensor):
        raise TransformError(f"derivatives in a matrix by argument {argnum}, a {type(x).__name__}",
                             "a Tensor")
    return x, lambda one: fn(*args[:argnum], one, *args[argnum + 1:])


def _tensor(out: Any) -> Tensor:
    if isinstance(out, Tensor): return out
    raise TransformError(f"derivatives in a matrix of a {type(out).__name__}",
                         "a function that returns a Tensor")


def _units(like: Tensor) -> Tensor:
    """All unit vectors of a shape: [elements, *shape]."""
    n = prod(int(each) for each in like.shape)
    units = Tensor.eye(n, dtype=like.dtype).reshape(n, *like.shape)
    return Tensor(units.uop.clone(device=concrete(like).device))
