"""`autodiff`: a function that has its derivatives as attributes."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ClassVar

from tinygrad_nv.transforms.gradients import grad, jvp, value_and_grad, vjp


class autodiff:
    """A function with `grad`, `value_and_grad`, `vjp` and `jvp`: `@autodiff`, or `@autodiff(argnums=1,
    has_aux=True)`.

    `f.grad(*args)` is `grad(f)(*args)`, by the arguments `argnums`; with `has_aux` f returns (loss, aux).
    `f.vjp(*args)` and `f.jvp(primals, tangents)` are `vjp(f, *args)` and `jvp(f, primals, tangents)`. Under
    `jit` they are captured as well, but `vjp`, which returns a function."""

    # whether `jit` makes a capture of it
    transforms: ClassVar = {"grad": True, "value_and_grad": True, "jvp": True, "vjp": False}

    def __init__(self, fn: Callable[..., Any], argnums: int | Sequence[int] = 0,
                 has_aux: bool = False) -> None:
        self.fn = fn
        self.grad = grad(fn, argnums, has_aux)
        self.value_and_grad = value_and_grad(fn, argnums, has_aux)
        self.vjp = functools.partial(vjp, fn)
        self.jvp = functools.partial(jvp, fn)
        functools.update_wrapper(self, fn, updated=())

    def __new__(cls, fn: Callable[..., Any] | None = None, argnums: int | Sequence[int] = 0,
                has_aux: bool = False) -> Any:
        """The function; without one, what takes it."""
        if fn is None: return functools.partial(cls, argnums=argnums, has_aux=has_aux)
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any: return self.fn(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)
