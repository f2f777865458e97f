"""A function of Tensors as a function of torch's tensors: `function(fn)`.

Protocol. `fn` takes trees of Tensors and returns one, and is pure, as transforms/ asks. Called with torch's
tensors in the Tensors' place, `function(fn)` captures it once for each set of shapes (captured.py) and
replays it: arguments are read, and results written, where torch has them. Arguments that are no tensors are
constants of a capture.

The result is differentiable as often as `fn` is: its backward pass is the function of Tensors
vjp(fn)(arguments, gradients), called in the same way, which computes fn's intermediates again.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from tinygrad import Tensor, dtypes
from torch.utils import _pytree as trees

from tinygrad_nv.errors import TorchError
from tinygrad_nv.torch.captured import Captured, Plan
from tinygrad_nv.torch.lowering import Unsupported, dtype_of
from tinygrad_nv.transforms import vjp

_lock = threading.RLock()   # tinygrad records one function at a time


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A pure function of trees of Tensors as a function of the same trees of torch's tensors on the CPU.

    Results require gradients if an argument does; second derivatives work, too. The wrapper has no state that
    torch.compile could see: a graph breaks around it. Raises `TorchError` for tensors elsewhere, dtypes that
    one side does not have, constants without a hash, and results that are no Tensors."""
    flat: dict[Hashable, _Flat] = {}

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = trees.tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        for each in tensors: _check(each)
        constants = tuple(_TENSOR if isinstance(each, torch.Tensor) else each for each in leaves)
        try: found = flat.get((spec, constants))
        except TypeError as error:
            raise TorchError(f"an argument that is no tensor and has no hash: {error}",
                             "tensors, and values that stay as they are", "give arrays as tensors") from error
        if found is None: found = flat[spec, constants] = _Flat(_filled(fn, spec, constants))
        return found.tree_of(_Call.apply(found, *tensors))
    made: Callable[..., Any] = torch.compiler.disable(called)
    return made


class _Mark:
    """The place of a tensor among constants."""


_TENSOR = _Mark()


class _Flat:
    """A function of a list of Tensors that returns a list, and its captures."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.tree: Any = None
        self.plan = Plan(self._lower)
        self.captures: dict[Hashable, Captured] = {}
        self.backwards: dict[tuple[bool, ...], _Flat] = {}

    def _lower(self, given: Sequence[Any]) -> list[Tensor]:
        leaves, self.tree = trees.tree_flatten(self.fn(*given))
        for each in leaves:
            if isinstance(each, Tensor): continue
            raise TorchError(f"a function that returns a {type(each).__name__}", "Tensors, or a tree of them")
        return leaves

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        key = self.plan.key(tensors)
        with _lock:
            if (found := self.captures.get(key)) is None:
                try: found = self.captures[key] = Captured(self.plan, tensors)
                except Unsupported as error: raise TorchError(str(error), "a dtype that both have") from error
            return found(tensors)

    def tree_of(self, leaves: Sequence[torch.Tensor]) -> Any:
        return trees.tree_unflatten(list(leaves), self.tree)

    def backward(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> _Flat:
        """J^T of the function: of its arguments, and of the gradients of those results that have one."""
        derived = tuple(x.dtype.is_floating_point for x in inputs)
        given = tuple(each is not None for each in results)
        if (found := self.backwards.get((*derived, *given))) is None:
            found = self.backwards[(*derived, *given)] = _Flat(_pulled(self.fn, derived, given))
        return found


class _Call(torch.autograd.Function):
    """One call, as torch's autograd sees it."""

    @staticmethod
    def forward(ctx: Any, flat: _Flat, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = flat(tensors)
        ctx.flat = flat
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each in made if not each.dtype.is_floating_point))
        ctx.save_for_backward(*tensors)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        present = [each for each in grads if each is not None]
        if not present: return (None,) * (1 + len(inputs))
        found = iter(_Call.apply(ctx.flat.backward(inputs, grads), *inputs, *present))
        return (None, *(next(found) if x.dtype.is_floating_point else None for x in inputs))


def _filled(fn: Callable[..., Any], spec: Any, constants: Sequence[Any]) -> Callable[..., Any]:
    """fn of its tensors alone."""
    def of_tensors(*given: Tensor) -> Any:
        rest = iter(given)
        leaves = [next(rest) if each is _TENSOR else each for each in constants]
        args, kwargs = trees.tree_unflatten(leaves, spec)
        return fn(*args, **kwargs)
    return of_tensors


def _pulled(fn: Callable[..., Any], derived: Sequence[bool], given: Sequence[bool]) -> Callable[..., Any]:
    """(arguments, gradients of results) → gradients of those arguments that are floats."""
    def pull(*values: Tensor) -> list[Tensor]:
        inputs, grads = list(values[:len(derived)]), iter(values[len(derived):])
        floats = [x for x, wanted in zip(inputs, derived, strict=True) if wanted]

        def of_floats(*floats: Tensor) -> list[Tensor]:
            rest = iter(floats)
            full = [next(rest) if wanted else x for x, wanted in zip(inputs, derived, strict=True)]
            return list(trees.tree_flatten(fn(*full))[0])
        results, back = vjp(of_floats, *floats)
        return list(back([next(grads) if has else each.zeros_like() if dtypes.is_float(each.dtype) else each
                          for each, has in zip(results, given, strict=True)]))
    return pull


def _check(x: torch.Tensor) -> None:
    """Raises `TorchError` for what cannot be shared."""
    if x.device.type != "cpu":
        raise TorchError(f"a tensor on {x.device}", "a tensor on the CPU", "x.cpu() first")
    if x.layout is not torch.strided:
        raise TorchError(f"a tensor of layout {x.layout}", "a dense one", "x.to_dense()")
    try: dtype_of(x.dtype)
    except Unsupported as error:
        raise TorchError(f"a tensor of {x.dtype}: {error}", "a dtype that both have") from error
