"""TinyJit's arguments: each a buffer of a known size. Part of __init__.py, which states the protocol.

tinygrad 0.14.0 takes an argument for a constant where it is a view that `.contiguous()` made of a larger
Tensor (`X[i:i + 1].contiguous()`, a mini-batch), and replays what was there at the capture. Of an argument of
one dimension it compares no size. Here such a view becomes a copy before TinyJit sees it, and an argument
that differs from the captured one is refused in words that say which, and how.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tinygrad import Tensor
from tinygrad.engine import jit
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.hooks.replaced import put_back, replace, theirs


def install() -> None:
    """As hooks.install_captures."""
    replace(jit, "_prepare_jit_inputs", _prepared)
    replace(jit._TinyJit, "__call__", functools.wraps(jit._TinyJit.__call__)(_called))


def remove() -> None:
    """Undoes `install`. What was captured meanwhile has to be captured again."""
    put_back(jit, "_prepare_jit_inputs")
    put_back(jit._TinyJit, "__call__")


def _prepared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[UOp], Any, Any, list[Any]]:
    """What tinygrad's own says of arguments, each with its size."""
    prepare = theirs(jit, "_prepare_jit_inputs")
    places, variables, names, kinds = prepare(args, kwargs)
    if len(places) < len(kinds):    # one has no place in memory of its own
        made = [each for each in _tensors(args, kwargs) if _place(each).base.realized is None]
        copies = [each.clone() for each in made]
        Tensor.realize(*copies)
        for each, copy in zip(made, copies, strict=True): each.uop = copy.uop
        places, variables, names, kinds = prepare(args, kwargs)
    # what has no elements has no place even then
    sizes = [place.shape for place in places] if len(places) == len(kinds) else [None] * len(kinds)
    return places, variables, names, [(*kind, size) for kind, size in zip(kinds, sizes, strict=True)]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The Tensors that TinyJit takes for arguments: also in a list, a tuple or a dict, but no deeper."""
    for given in (*args, *kwargs.values()):
        inner = given.values() if isinstance(given, dict) else given
        found = (given, *inner) if isinstance(given, dict | list | tuple) else (given,)
        yield from (each for each in found if type(each) is Tensor)


def _place(tensor: Tensor) -> UOp: return tensor.uop.src[0] if tensor.uop.op is Ops.UNSHARD else tensor.uop


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    try: return theirs(jit._TinyJit, "__call__")(self, *args, **kwargs)
    except jit.JitError as error:
        if not str(error).startswith("args mismatch"): raise
        raise jit.JitError(_difference(self.captured, *_prepared(args, kwargs)[2:])) from error


def _difference(captured: Any, names: list[Any], kinds: list[Any]) -> str:
    """What is not as it was at the capture, and what to do."""
    before, after = captured.expected_input_info, kinds
    if captured.expected_names != names or len(before) != len(after):
        return (f"TinyJit has captured the arguments {captured.expected_names}, and is called with {names}: "
                "give the same ones in each call")
    number = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    named = repr(names[number]) if number < len(names) else f"number {number}"
    found = [f"{what} {old} then, {new} now" for (what, old), (_, new) in
             zip(_described(*before[number]), _described(*after[number]), strict=True) if old != new]
    return (f"TinyJit is called with another argument {named} than it has captured: "
            + (", ".join(found) or "a view of another place of a larger Tensor")
            + "; give Tensors of one shape, dtype and device, a part of a larger one as its `.clone()`, or "
              "take tinygrad_nv.transforms.jit, which captures each kind of arguments")


def _described(view: UOp, _: Any, dtype: Any, device: Any, size: Any) -> tuple[tuple[str, Any], ...]:
    """What an argument is, but for its place."""
    return ("shape", view.shape if view._shape else size), ("dtype", dtype), ("device", device)
