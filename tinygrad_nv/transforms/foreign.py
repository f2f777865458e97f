"""Functions of Tensors that are called with the arrays of another library: what torch/ and jax.py share.

Protocol. Arguments are leaves of a tree. Those that are arrays vary; the others are `Constants`, a part of
what a capture depends on. `pulled(fn, …)` is the backward pass of a function of lists.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.transforms.gradients import vjp

_PLACE = object()     # of an array


@dataclass(frozen=True)
class Constants:
    """Leaves that are no arrays, with places for those that are. Equal where the same function results: 1,
    1.0 and True are three constants, and so are 0.0 and -0.0."""
    leaves: tuple[Any, ...] = field(compare=False)
    key: tuple[Any, ...]

    @staticmethod
    def of(leaves: Sequence[Any], is_array: Callable[[Any], bool]) -> Constants:
        kept = tuple(_PLACE if is_array(each) else each for each in leaves)
        return Constants(kept, tuple(map(_exact, kept)))

    def fill(self, arrays: Sequence[Any]) -> list[Any]:
        """All leaves."""
        rest = iter(arrays)
        return [next(rest) if each is _PLACE else each for each in self.leaves]


def _exact(x: Any) -> tuple[Any, ...]:
    """A value that differs where x does: of floats, and NaN, by their text."""
    return type(x), repr(x) if isinstance(x, float | complex | np.inexact) else x


def pullback(fn: Callable[..., list[Tensor]], derived: Sequence[bool],
           given: Sequence[bool]) -> Callable[..., list[Tensor]]:
    """(arguments, gradients of the `given` results) → gradients of the `derived` arguments."""
    def pull(*values: Tensor) -> list[Tensor]:
        inputs, grads = values[:len(derived)], iter(values[len(derived):])

        def of_derived(*some: Tensor) -> list[Tensor]:
            rest = iter(some)
            return fn(*(next(rest) if wanted else x for x, wanted in zip(inputs, derived, strict=True)))
        results, back = vjp(of_derived, *(x for x, wanted in zip(inputs, derived, strict=True) if wanted))
        return list(back([next(grads) if has else each.zeros_like() if dtypes.is_float(each.dtype) else each
                          for each, has in zip(results, given, strict=True)]))
    return pull


def shapes_of(given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Shapes and dtypes that the structure of a result may depend on."""
    return tuple((tuple(each.shape), each.dtype) for each in given)
