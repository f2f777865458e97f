"""`@checked`: a function whose arguments and results are held to their annotations, at each call.

Protocol. The names in annotations have one size in a call: the first argument that has a name gives it, an
int argument gives the name it is called by, and every other dimension, the result's too, must agree. Dtypes
must be equal where an annotation has one. What does not fit inside, while the function builds its graph,
becomes a `ShapeError` with the line, the operands and where each is from, before anything runs. `fn.report()`
and `fn.verify()` say the same without arguments (inference.py). Values pass through as they are.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

from tinygrad import Tensor

from tinygrad_nv.errors import ShapeError, as_well
from tinygrad_nv.shapes.binding import Bindings
from tinygrad_nv.shapes.inference import Report, infer, origin, plain_shape
from tinygrad_nv.shapes.signature import Signature, inner, leaves, signature
from tinygrad_nv.shapes.tracing import of_tinygrad, run, tensors

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Checked(Protocol[P, R]):
    """A checked function."""
    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: """The function's result."""

    def report(self, sizes: Mapping[str, int] | None = None,
               values: Mapping[str, Any] | None = None) -> Report:
        """The shapes of its variables, and what does not fit, without running it."""

    def verify(self, sizes: Mapping[str, int] | None = None, values: Mapping[str, Any] | None = None) -> None:
        """Raises `ShapeError` for what does not fit, without running it."""


def checked(fn: Callable[P, R]) -> Checked[P, R]:
    """The function, with its arguments and results checked at each call. Raises `ShapeError` there."""
    cached = list[Signature]()
    plain = inner(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not cached: cached.append(signature(plain))
        bindings = _arguments(cached[0], args, kwargs)
        try:
            result = fn(*args, **kwargs)
            for _, each in tensors("", result): _ = each.shape    # or tinygrad's error
        except Exception as error:
            if not of_tinygrad(error): raise
            raise _inside(plain, cached[0], args, kwargs, error) from error
        for leaf in leaves(cached[0].result, result, "the result"):
            bindings.tensor(leaf.where, leaf.type, leaf.value.shape, leaf.value.dtype)
        return result
    made: Any = wrapper
    made.report = functools.partial(infer, fn)
    made.verify = lambda *args, **kwargs: infer(fn, *args, **kwargs).raise_mismatch()
    return made


def _arguments(own: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bindings:
    """The sizes that the arguments of a call give to names. Raises `ShapeError`."""
    try: given = own.parameters.bind(*args, **kwargs)
    except TypeError: return Bindings()     # Python says it when the function is called
    given.apply_defaults()
    bindings, symbols = Bindings(), own.symbols
    for name, value in given.arguments.items():     # first: they decide how a product of names is split
        if type(value) is int and name in symbols: bindings.scalar(name, value, f"argument {name}={value}")
    for name, value in given.arguments.items():
        for leaf in leaves(own.annotations.get(name), value, f"argument {name}"):
            bindings.tensor(leaf.where, leaf.type, leaf.value.shape, leaf.value.dtype)
    return bindings


def _inside(plain: Callable[..., Any], own: Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
            error: Exception) -> Exception:
    """Returns what did not fit inside a function: it is called again, and its lines are followed."""
    if not all(_is_data(each) for each in (*args, *kwargs.values())): return error
    failure = run(plain, args, kwargs).failure
    if failure is None: return error
    found = f"{failure.file}:{failure.line}, in {plain.__qualname__}: {failure.text}: {failure.reason}"
    expected = "; ".join(origin(each, plain_shape(each.shape), own) for each in failure.operands)
    return as_well(ShapeError(found, expected), error)


def _is_data(given: Any) -> bool:
    """Whether a second call with an argument finds it as the first did."""
    if isinstance(given, list | tuple): return all(map(_is_data, given))
    if isinstance(given, dict): return all(map(_is_data, given.values()))
    return given is None or isinstance(given, Tensor | str | int | float)
