"""`jit`: a pure function as captured kernels, one capture for each kind of arguments.

Protocol. A TinyJit for each structure, shapes, dtypes and devices of arguments, and each value of what is no
Tensor; another one inside `with deterministic():`. Its first call runs as it is, the second is captured,
others are replayed. Results are Tensors of their own: TinyJit's are written over by the next call. Under
another transform, and while another TinyJit is being captured, the function is called as it is, and becomes
part of that graph.

What the function closes over is captured as it was: assign new values to such Tensors (`assign`), or give
them as arguments. Python's side effects happen in the first two calls alone.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any

from tinygrad import Tensor, TinyJit
from tinygrad.engine.realize import capturing
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.tile import order
from tinygrad_nv.transforms.tracing import active, concrete
from tinygrad_nv.transforms.trees import Tree, flatten


class _Captured:
    """A function of one kind of arguments."""

    def __init__(self, fn: Callable[..., Any], tree: Tree) -> None:
        self.fn, self.tree = fn, tree
        self.shape: Tree | None = None
        self.constants = list[Tensor | None]()
        self.step: Any = TinyJit(self._run)
        self.constant = False

    def _run(self, *leaves: Tensor) -> list[Tensor]:
        args, kwargs = self.tree.fill(leaves)
        results, self.shape = flatten(self.fn(*args, **kwargs))
        self.constants = [each if each.uop.is_virtual else None for each in results]
        # an argument, or what the function closes over, is another Tensor's memory
        given = [each for each in results if not each.uop.is_virtual]
        return _realize([each.clone() if each.uop.is_realized else each for each in given])

    def __call__(self, leaves: list[Tensor]) -> Any:
        if self.constant or not leaves: made = self._run(*leaves)
        else:
            made = [each.clone() for each in self.step(*leaves)]
            self.constant = not made    # no kernels to capture
        _realize(made)
        assert self.shape is not None
        rest = iter(made)
        return self.shape.fill([next(rest) if each is None else each for each in self.constants])


def _realize(given: list[Tensor]) -> list[Tensor]:
    if given: Tensor.realize(*given)
    return given


class jit:
    """A pure function of trees of Tensors, captured for each kind of arguments. Raises `TransformError` for
    arguments that cannot be told apart, as they have no hash."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.captured: dict[Hashable, _Captured] = {}
        functools.update_wrapper(self, fn, updated=())    # no derivatives that are not captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = flatten((args, kwargs))
        if capturing or active(): return self.fn(*args, **kwargs)
        given = _buffers(leaves)
        kinds = tuple((each.shape, each.dtype, each.device, each.uop.axis) for each in given)
        key = order.is_wanted(), tree, kinds
        try: found = self.captured.get(key)
        except TypeError as error:
            raise TransformError(f"jit of {self._name} with an argument that has no hash: {error}",
                                 "Tensors, and values that stay as they are",
                                 "give arrays as Tensors") from error
        if found is None: found = self.captured[key] = _Captured(self.fn, tree)
        return found(given)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        """Derivatives of an `autodiff` function, captured too."""
        if name == "fn" or name not in (captures := getattr(self.fn, "transforms", {})):
            raise AttributeError(f"a function under jit has no {name}")
        made = jit(getattr(self.fn, name)) if captures[name] else getattr(self.fn, name)
        setattr(self, name, made)
        return made

    @property
    def _name(self) -> str: return str(getattr(self.fn, "__name__", self.fn))


def _buffers(leaves: list[Tensor]) -> list[Tensor]:
    """Arguments in memory, each its own: a part of a larger Tensor, which lies elsewhere in each call, as a
    copy."""
    made, seen = list(map(concrete, leaves)), set[UOp]()
    _realize([each for each in made if not each.uop.is_realized])
    for i, each in enumerate(made):
        if each.uop.base in seen or not each.uop.has_buffer_identity(): made[i] = each.clone()
        seen.add(made[i].uop.base)
    return _realize(made)
