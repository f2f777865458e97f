"""TinyJit's arguments: each a buffer of a known size. Part of __init__.py, which states the protocol.

tinygrad 0.14.0 takes an argument for a constant where it is a view that `.contiguous()` made of a larger
Tensor (`X[i:i + 1].contiguous()`, a mini-batch), and replays what was there at the capture. Of an argument of
one dimension it compares no size. Here such a view becomes a copy before TinyJit sees it, and an argument
that differs from the captured one is refused in words that say which, and how.

A view that lies elsewhere in the second call, which is captured, than in the first is one that moves: from
then on TinyJit gets a copy of it, and what a call writes into the copy is written back. Views that stay are
TinyJit's own; those that move later are refused.
"""
from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tinygrad import Tensor
from tinygrad.engine import jit
from tinygrad.engine.realize import get_call_arg_uops
from tinygrad.helpers import JIT
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.hooks.replaced import put_back, replace, theirs

DUPLICATES = "duplicate inputs"
_own = threading.local()    # `first`: the arguments that are prepared next are those of a first call


def install() -> None:
    """Installs the captures, for hooks.install_captures."""
    replace(jit, "_prepare_jit_inputs", _prepare)
    replace(jit._TinyJit, "__call__", functools.wraps(jit._TinyJit.__call__)(_call))


def remove() -> None:
    """Undoes `install`. What was captured meanwhile has to be captured again."""
    put_back(jit, "_prepare_jit_inputs")
    put_back(jit._TinyJit, "__call__")


def _prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[UOp], Any, Any, list[Any]]:
    """Returns what tinygrad's own says of arguments, each with its size."""
    prepare = theirs(jit, "_prepare_jit_inputs")
    first, _own.first = getattr(_own, "first", False), False
    try: places, variables, names, kinds = prepare(args, kwargs)
    except jit.JitError as error:
        # a first call captures nothing; in the second those that moved are copies
        if not first or not str(error).startswith(DUPLICATES) or not _are_different(args, kwargs): raise
        return [], {}, [], []
    if len(places) < len(kinds):    # one has no place in memory of its own
        made = [each for each in _tensors(args, kwargs) if _place(each).base.realized is None]
        copies = [each.clone() for each in made]
        Tensor.realize(*copies)
        for each, own in zip(made, copies, strict=True): each.uop = own.uop
        places, variables, names, kinds = prepare(args, kwargs)
    # what has no elements has no place even then
    sizes = [place.shape for place in places] if len(places) == len(kinds) else [None] * len(kinds)
    return places, variables, names, [(*kind, size) for kind, size in zip(kinds, sizes, strict=True)]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The Tensors that TinyJit takes for arguments, in its order: also in a list, a tuple or a dict, but no
    deeper."""
    named = [given for _, given in sorted(kwargs.items())]
    outer = [given for given in (*args, *named) if given.__class__ is Tensor]
    inner = {id(each): each for given in (*args, *kwargs.values()) for each in _tensors_in(given)}
    return [*outer, *(each for each in inner.values() if not any(each is other for other in outer))]


def _tensors_in(given: Any) -> Iterator[Tensor]:
    inner = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else ()
    yield from (each for each in inner if each.__class__ is Tensor)


def _place(tensor: Tensor) -> UOp: return tensor.uop.src[0] if tensor.uop.op is Ops.UNSHARD else tensor.uop


def _are_different(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no two arguments are the same part of a Tensor."""
    uops = [each.uop for each in _tensors(args, kwargs)]
    return len(set(uops)) == len(uops)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    call = theirs(jit._TinyJit, "__call__")
    if not JIT or self.fxn is None: return _explain_mismatch(call, self, args, kwargs)
    if self.cnt == 0:
        self.kinds_before, self.moving = _kinds(args, kwargs), ()
        _own.first = True
        try: return call(self, *args, **kwargs)
        finally: _own.first = False
    if self.cnt == 1 and (before := self.__dict__.pop("kinds_before", None)) is not None:
        self.moving = _moving(before, _kinds(args, kwargs))
    if not getattr(self, "moving", ()): return _explain_mismatch(call, self, args, kwargs)
    tensors = _tensors(args, kwargs)
    views = {i: tensors[i] for i in self.moving if i < len(tensors)}
    copies = {i: each.clone() for i, each in views.items()}
    Tensor.realize(*copies.values())
    copied = {id(views[i]): each for i, each in copies.items()}
    made = _explain_mismatch(call, self, tuple(_exchange_views(each, copied) for each in args),
                 {name: _exchange_views(each, copied) for name, each in kwargs.items()})
    if written := [views[i].assign(copies[i]) for i in _find_written(self.captured) & views.keys()]:
        Tensor.realize(*written)
    return made


def _explain_mismatch(call: Any, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls, with words of ours where arguments differ from the captured ones."""
    try: return call(self, *args, **kwargs)
    except jit.JitError as error:
        if not str(error).startswith("args mismatch"): raise
        raise jit.JitError(_difference(self.captured, *_prepare(args, kwargs)[2:])) from error


# **** views that move ****

def _kinds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the kind of each argument, also where two are parts of one Tensor."""
    return [kind for each in _tensors(args, kwargs) for kind in _prepare((each,), {})[3]]


def _moving(before: list[Any], now: list[Any]) -> tuple[int, ...]:
    """The arguments that are of one shape, dtype and device in two calls, and lie at different places."""
    if len(before) != len(now): return ()
    return tuple(i for i, (old, new) in enumerate(zip(before, now, strict=True))
                 if old[0] is not new[0] and _facts_of(*old) == _facts_of(*new))


def _exchange_views(given: Any, copied: Mapping[int, Tensor]) -> Any:
    """An argument with copies for views; a container that has none is the same one."""
    if given.__class__ is Tensor: return copied.get(id(given), given)
    if not any(id(each) in copied for each in _tensors_in(given)): return given
    if isinstance(given, tuple):
        items = [copied.get(id(each), each) for each in given]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    made = copy.copy(given)
    for key in (list(given) if isinstance(given, dict) else range(len(given))):
        made[key] = copied.get(id(given[key]), given[key])
    return made


def _find_written(captured: Any) -> set[int]:
    """The arguments that the launches of a capture write, by position."""
    if (found := getattr(captured, "written_arguments", None)) is None:
        found = set[int]()
        for call in captured._linear.toposort():
            if call.op is not Ops.CALL: continue
            given = get_call_arg_uops(call)
            bases = {given[k].base for k in jit.get_call_outs_ins(call)[0]}
            found |= {base.arg.slot for base in bases if base.op is Ops.PARAM}
        captured.written_arguments = found
    return found


# **** words ****

def _difference(captured: Any, names: list[Any], kinds: list[Any]) -> str:
    """Returns what is not as it was at the capture, and what to do."""
    before, after = captured.expected_input_info, kinds
    if captured.expected_names != names or len(before) != len(after):
        return (f"TinyJit has captured the arguments {captured.expected_names}, and is called with {names}: "
                "give the same ones in each call")
    number = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    named = repr(names[number]) if number < len(names) else f"number {number}"
    found = [f"{what} {old} then, {new} now" for (what, old), (_, new) in
             zip(_facts_of(*before[number]), _facts_of(*after[number]), strict=True) if old != new]
    return (f"TinyJit is called with another argument {named} than it has captured: "
            + (", ".join(found) or "a view of another place of a larger Tensor")
            + "; give Tensors of one shape, dtype and device, a part of a larger one as its `.clone()`, or "
              "take tinygrad_nv.transforms.jit, which captures each kind of arguments")


def _facts_of(view: UOp, _: Any, dtype: Any, device: Any, size: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the facts of an argument, but for its place."""
    return ("shape", view.shape if view._shape else size), ("dtype", dtype), ("device", device)
