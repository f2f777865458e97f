"""Methods and attributes of Tensor that are ours while enabled. Part of __init__.py, which states the
protocol.

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

from tinygrad_nv.errors import HookError
from tinygrad_nv.hooks.replaced import add, put_back, remove, replace, theirs

_methods: dict[str, tuple[Any, Any, bool]] = {}  # the class that has it, ours, whether also while disabled
_attributes: dict[str, tuple[Any, bool]] = {}  # the value, and whether it stays while disabled
_creations: dict[str, Callable[[Any, Any], tuple[UOp, Any] | None]] = {}


def add_method(name: str, fn: Callable[..., Any], always: bool = False) -> None:
    """Registers `fn(theirs, self, …)` for Tensor's method `name`; `theirs(self, …)` is tinygrad's own.
    `always`: while disabled, too."""
    owner = next(cls for cls in Tensor.__mro__ if name in vars(cls))
    theirs = vars(owner)[name]

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # where tinygrad notes no names of methods, UOps have the same one
        if not isinstance(self, Tensor): return theirs(self, *args, **kwargs)
        return fn(theirs, self, *args, **kwargs)

    named = TRACEMETA >= 1 and name not in ("backward", "gradient")     # as tinygrad does
    ours = functools.wraps(theirs)(tensors._metadata_wrapper(method)) if named else method
    add(_methods, "method", name, (owner, ours, always))


def remove_method(name: str) -> None:
    """Undoes `add_method`."""
    owner, *_ = remove(_methods, "method", name)
    put_back(owner, name)


def add_attribute(name: str, value: Any, always: bool = False) -> None:
    """Registers an attribute that tinygrad's Tensor does not have; `always`: while disabled, too."""
    if hasattr(Tensor, name) and name not in _attributes:
        raise HookError(f"Tensor has a {name} of tinygrad's", "a name that it does not have", "add_method")
    add(_attributes, "attribute", name, (value, always))


def remove_attribute(name: str) -> None:
    """Undoes `add_attribute`."""
    remove(_attributes, "attribute", name)
    if name in vars(Tensor): delattr(Tensor, name)


def add_creation(name: str, fn: Callable[[Any, Any], tuple[UOp, Any] | None]) -> None:
    """Registers `fn(data, device)` for data that tinygrad's Tensor(data, device) does not know: the UOp and
    the device to make the Tensor of, or None."""
    add(_creations, "creation", name, fn)


def remove_creation(name: str) -> None:
    """Undoes `add_creation`."""
    remove(_creations, "creation", name)


def _init(self: Tensor, data: Any, device: Any = None, dtype: Any = None) -> None:
    init = theirs(Tensor, "__init__")
    try: return init(self, data, device, dtype)  # what tinygrad knows costs nothing here
    except RuntimeError as error: refusal = error
    made = next(filter(None, (fn(data, device) for fn in _creations.values())), None)
    if made is None: raise refusal
    return init(self, *made, dtype)


def apply(on: bool) -> None:
    """Puts methods in the place of tinygrad's, or those back."""
    for name, (value, always) in _attributes.items():
        if on or always: setattr(Tensor, name, value)
        elif name in vars(Tensor): delattr(Tensor, name)
    if on and _creations: replace(Tensor, "__init__", functools.wraps(Tensor.__init__)(_init))
    else: put_back(Tensor, "__init__")
    changed = any(not always for *_, always in _methods.values())
    if on and changed: replace(gradient, "_compact_params", _compact_params)
    else: put_back(gradient, "_compact_params")
    for name, (owner, ours, always) in _methods.items():
        if on or always: replace(owner, name, ours)
        else: put_back(owner, name)


def _compact_params(body: UOp, all_args: tuple[UOp, ...]) -> tuple[UOp, tuple[UOp, ...]]:
    """A body with its own parameters alone, counted anew, and their arguments."""
    found = {p.arg.slot: p for p in body.toposort(enter_calls=False) if p.op is Ops.PARAM}
    used = [p for _, p in sorted(found.items())]
    counted = {p: p.replace(arg=dataclasses.replace(p.arg, slot=i)) for i, p in enumerate(used)}
    return body.substitute(counted, walk=True), tuple(all_args[p.arg.slot] for p in used)
