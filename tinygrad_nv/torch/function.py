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
from tinygrad import Tensor
from tinygrad.dtype import strong_dtype
from torch.utils import _pytree as trees

from tinygrad_nv.errors import TorchError
from tinygrad_nv.torch.captured import Captured, Plan
from tinygrad_nv.torch.lowering import Unsupported, dtype_of
from tinygrad_nv.transforms import vmap
from tinygrad_nv.transforms.foreign import Constants, pullback, shapes_of

_lock = threading.RLock()   # tinygrad records one function at a time


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A pure function of trees of Tensors as a function of the same trees of torch's tensors on the CPU.

    Results require gradients if an argument does; second derivatives work, too. The wrapper has no state that
    torch.compile could see: a graph breaks around it. Raises `TorchError` for tensors elsewhere, dtypes that
    one side does not have, constants without a hash, and results that are no Tensors."""
    flat: dict[Hashable, _Flat] = {}

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = trees.tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        for each in tensors: _check(each)
        constants = Constants.of(leaves, lambda each: isinstance(each, torch.Tensor))
        try: found = flat.get((spec, constants))
        except TypeError as error:
            raise TorchError(f"an argument that is no tensor and has no hash: {error}",
                             "tensors, and values that stay as they are", "give arrays as tensors") from error
        if found is None: found = flat[spec, constants] = _Flat(_bind_constants(fn, spec, constants))
        return found.tree_of(tensors, _Call.apply(found, *tensors))
    made: Callable[..., Any] = torch.compiler.disable(call)
    return made


class _Flat:
    """A function of a list of Tensors that returns a list, and its captures."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.tree: Any = None       # of the last capture
        self.trees: dict[Hashable, Any] = {}
        self.plan = Plan(self._lower)
        self.captures: dict[Hashable, Captured] = {}
        self.backwards: dict[tuple[bool, ...], _Flat] = {}
        self.batches: dict[tuple[bool, ...], _Flat] = {}

    def _lower(self, given: Sequence[Any]) -> list[Tensor]: return self._leaves(*given)

    def _leaves(self, *given: Tensor) -> list[Tensor]:
        leaves, self.tree = trees.tree_flatten(self.fn(*given))
        self.trees[shapes_of(given)] = self.tree
        for each in leaves:
            if isinstance(each, Tensor): continue
            raise TorchError(f"a function that returns a {type(each).__name__}", "Tensors, or a tree of them")
        return [each.cast(strong_dtype(each.dtype)) for each in leaves]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        key = self.plan.key(tensors)
        with _lock:
            if (found := self.captures.get(key)) is None:
                try: found = self.captures[key] = Captured(self.plan, tensors)
                except Unsupported as error: raise TorchError(str(error), "a dtype that both have") from error
            return found(tensors)

    def tree_of(self, tensors: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Any:
        """The results for arguments as a tree; examples of torch.vmap have the last one."""
        key = tuple((tuple(each.shape), dtype_of(each.dtype)) for each in tensors)
        return trees.tree_unflatten(list(leaves), self.trees.get(key, self.tree))

    def backward(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> _Flat:
        """J^T of the function: of its arguments, and of the gradients of those results that have one."""
        derived = tuple(x.dtype.is_floating_point for x in inputs)
        given = tuple(each is not None for each in results)
        if (found := self.backwards.get((*derived, *given))) is None:
            found = self.backwards[(*derived, *given)] = _Flat(pullback(self._leaves, derived, given))
        return found

    def batch(self, axes: tuple[bool, ...]) -> _Flat:
        """The function of many examples of the arguments in `axes`."""
        if axes not in self.batches:
            fn = vmap(self._leaves, in_axes=tuple(0 if each else None for each in axes))
            self.batches[axes] = _Flat(fn)
        return self.batches[axes]


class _Call(torch.autograd.Function):
    """One call, as torch's autograd sees it."""

    @staticmethod
    def forward(flat: _Flat, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]: return tuple(flat(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.flat, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each in output if not each.dtype.is_floating_point))
        ctx.save_for_backward(*tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], flat: _Flat, *tensors: torch.Tensor
             ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        dims = in_dims[1:]
        given = [x if d is None else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        made = _Call.apply(flat.batch(tuple(d is not None for d in dims)), *given)
        return made, (0,) * len(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        present = [each for each in grads if each is not None]
        if not present: return (None,) * (1 + len(inputs))
        found = iter(_Call.apply(ctx.flat.backward(inputs, grads), *inputs, *present))
        return (None, *(next(found) if x.dtype.is_floating_point else None for x in inputs))


def _bind_constants(fn: Callable[..., Any], spec: Any, constants: Constants) -> Callable[..., Any]:
    """fn of its tensors alone."""
    def of_tensors(*given: Tensor) -> Any:
        args, kwargs = trees.tree_unflatten(constants.fill(given), spec)
        return fn(*args, **kwargs)
    return of_tensors


def _check(x: torch.Tensor) -> None:
    """Raises `TorchError` for what cannot be shared."""
    if x.device.type != "cpu":
        raise TorchError(f"a tensor on {x.device}", "a tensor on the CPU", "x.cpu() first")
    if x.layout is not torch.strided:
        raise TorchError(f"a tensor of layout {x.layout}", "a dense one", "x.to_dense()")
    try: dtype_of(x.dtype)
    except Unsupported as error:
        raise TorchError(f"a tensor of {x.dtype}: {error}", "a dtype that both have") from error
