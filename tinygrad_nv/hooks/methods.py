"""Methods of Tensor that are ours while enabled. Part of __init__.py, which states the protocol.

With them goes a correction: tinygrad 0.14.0 takes parameters of a function that is called inside another one
for the other's own when it derives that (`_compact_params`), which fails where there are more of them.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tinygrad import Tensor
from tinygrad import tensor as tensors
from tinygrad.helpers import TRACEMETA
from tinygrad.mixin import gradient
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.hooks.replaced import add, put_back, remove, replace

_methods: dict[str, tuple[Any, Any]] = {}  # the class that has it, and ours


def add_method(name: str, fn: Callable[..., Any]) -> None:
    """Registers `fn(theirs, self, …)` for Tensor's method `name`; `theirs(self, …)` is tinygrad's own."""
    owner = next(cls for cls in Tensor.__mro__ if name in vars(cls))
    theirs = vars(owner)[name]

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # where tinygrad notes no names of methods, UOps have the same one
        if not isinstance(self, Tensor): return theirs(self, *args, **kwargs)
        return fn(theirs, self, *args, **kwargs)

    ours = functools.wraps(theirs)(tensors._metadata_wrapper(method)) if TRACEMETA >= 1 else method
    add(_methods, "method", name, (owner, ours))


def remove_method(name: str) -> None:
    """Undoes `add_method`."""
    owner, _ = remove(_methods, "method", name)
    put_back(owner, name)


def apply(on: bool) -> None:
    """Puts methods in the place of tinygrad's, or those back."""
    if on and _methods: replace(gradient, "_compact_params", _compact_params)
    else: put_back(gradient, "_compact_params")
    for name, (owner, ours) in _methods.items():
        if on: replace(owner, name, ours)
        else: put_back(owner, name)


def _compact_params(body: UOp, all_args: tuple[UOp, ...]) -> tuple[UOp, tuple[UOp, ...]]:
    """A body with its own parameters alone, counted anew, and their arguments."""
    found = {p.arg.slot: p for p in body.toposort(enter_calls=False) if p.op is Ops.PARAM}
    used = [p for _, p in sorted(found.items())]
    counted = {p: p.replace(arg=dataclasses.replace(p.arg, slot=i)) for i, p in enumerate(used)}
    return body.substitute(counted, walk=True), tuple(all_args[p.arg.slot] for p in used)
