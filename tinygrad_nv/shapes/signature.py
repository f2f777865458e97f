"""Signatures: arguments and results of a function, by its annotations.

Protocol. `signature(fn)` reads them once; those that are texts (`from __future__ import annotations`) are
evaluated where the function was defined, with what it closes over. `leaves(annotation, value, where)` are the
tensors in a value with their types: of `Tensor[...]` itself, in tuple, list, dict, Sequence and Mapping, in
named tuples, dataclasses and TypedDicts with such annotations, in `Annotated[Tensor, Dims[...]]` and `... |
None`. A parameter of annotation int whose name is a symbol of the function gives that symbol its size.

A `KVCache[...]` of kvcache/ is a type, too: its four extents are those of the cache's keys.
"""
from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes.dims import Dim, parse
from tinygrad_nv.shapes.types import KTile, OTile, QTile, TensorType, Tile, parse_type

BARE = (Tile, KTile, QTile, OTile)    # without brackets: of any shape and dtype
NAMES = ("Tensor[", "Tile[", "Dims[", "KVCache[")


@dataclass(frozen=True)
class Leaf:
    """A tensor in an argument or a result: where it is, its type, its value."""
    where: str
    type: TensorType
    value: Any


@dataclass(frozen=True)
class Signature:
    """The annotations of a function's parameters, by name, and of its result."""
    parameters: inspect.Signature
    annotations: dict[str, Any]
    result: Any

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names in all types, in the order in which they come."""
        found = dict[str, None]()
        for each in (*self.annotations.values(), self.result):
            for one in types_in(each): found.update(dict.fromkeys(one.symbols))
        return tuple(found)

    @property
    def has_types(self) -> bool:
        """Whether any parameter or result has dimensions."""
        return any(types_in(each) for each in (*self.annotations.values(), self.result))


def inner(fn: Any) -> Any:
    """The function under decorators, bound if it is a method's or that of an object that is called."""
    if not inspect.isroutine(fn) and not hasattr(fn, "__wrapped__"): fn = fn.__call__
    owner = getattr(fn, "__self__", None)
    plain = inspect.unwrap(getattr(fn, "__func__", fn))
    return plain if owner is None else plain.__get__(owner)


def signature(fn: Any) -> Signature:
    """The annotations of a function, evaluated. Raises `ShapeError` for one of ours that cannot be."""
    given = dict(getattr(fn, "__annotations__", {}))
    evaluated = {name: _evaluate(fn, name, each) for name, each in given.items()}
    result = evaluated.pop("return", None)
    own = inspect.signature(fn)
    for name, parameter in own.parameters.items():      # *args and **kwargs are annotated by their elements
        one = evaluated.get(name)
        if parameter.kind is parameter.VAR_POSITIONAL: evaluated[name] = types.GenericAlias(tuple, (one, ...))
        if parameter.kind is parameter.VAR_KEYWORD: evaluated[name] = types.GenericAlias(dict, (str, one))
    return Signature(own, evaluated, result)


def _evaluate(fn: Any, name: str, given: Any) -> Any:
    if not isinstance(given, str): return given
    plain = getattr(fn, "__func__", fn)
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    closed = {key: cell.cell_contents for key, cell in cells if _has_contents(cell)}
    try:
        made = eval(given, plain.__globals__, closed)
        return _evaluate(fn, name, made) if isinstance(made, str) else made    # a text of a text
    except ShapeError: raise
    except Exception as error:
        # a name for type checkers alone is no concern of shapes
        if not any(each in given for each in NAMES): return None
        where = f"the annotation of {name} in {plain.__qualname__}, {given}"
        raise ShapeError(f"{where}, cannot be evaluated: {error}",
                         "names that are there when the function is called") from error


def _has_contents(cell: Any) -> bool:
    try: return cell.cell_contents is not None
    except ValueError: return False


def type_of(annotation: Any) -> TensorType | None:
    """The type that an annotation is, or that it has in Annotated."""
    if isinstance(annotation, TensorType): return annotation
    if annotation in BARE: return parse_type(annotation.__name__, ...)
    if typing.get_origin(annotation) is typing.Annotated:
        return next((each for each in typing.get_args(annotation)[1:] if isinstance(each, TensorType)), None)
    extents = getattr(annotation, "extents", None)
    if not isinstance(extents, tuple): return None
    dims = tuple(parse(each) if isinstance(each, str) else Dim.number(each) for each in extents)
    return TensorType("KVCache", dims, getattr(annotation, "dtype", None), False, tuple(map(str, extents)))


def types_in(annotation: Any) -> list[TensorType]:
    """All types in an annotation."""
    if (own := type_of(annotation)) is not None: return [own]
    within = list(typing.get_args(annotation)) or [each for _, each in fields(annotation)]
    return [one for each in within for one in types_in(each)]


def leaves(annotation: Any, value: Any, where: str) -> Iterator[Leaf]:
    """The tensors in a value with their types. Raises `ShapeError` for a value of another structure."""
    if (own := type_of(annotation)) is not None:
        yield Leaf(where, own, _tensor(own, value, where))
        return
    if not types_in(annotation): return
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType): yield from _one_of(args, value, where)
    elif origin is tuple: yield from _in_tuple(args, value, where)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _require(value, Mapping, "a dict", where)
        for key, each in value.items(): yield from leaves(args[1], each, f"{where}[{key!r}]")
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        _require(value, Sequence, "a list", where)
        for i, each in enumerate(value): yield from leaves(args[0], each, f"{where}[{i}]")
    else:
        for name, one in fields(annotation):
            each = value[name] if isinstance(value, Mapping) else getattr(value, name)
            yield from leaves(one, each, f"{where}.{name}")


def _one_of(args: tuple[Any, ...], value: Any, where: str) -> Iterator[Leaf]:
    """Yields the leaves of the first of alternatives that has the value's structure."""
    if value is None and type(None) in args: return
    typed = [each for each in args if types_in(each)]
    for each in typed:
        try: found = list(leaves(each, value, where))
        except ShapeError: continue
        own = [one for one in found if len(one.type.dims) == len(one.value.shape) or one.type.leading]
        if own == found or len(typed) == 1: return (yield from found)
    raise ShapeError(f"{where} is {_describe(value)}", f"one of {', '.join(map(str, args))}")


def _in_tuple(args: tuple[Any, ...], value: Any, where: str) -> Iterator[Leaf]:
    _require(value, Sequence, "a tuple", where)
    if args[-1] is ...: args = args[:1] * len(value)
    if len(args) != len(value):
        raise ShapeError(f"{where} has {len(value)} elements", f"{len(args)}, as its annotation says")
    for i, (one, each) in enumerate(zip(args, value, strict=True)):
        yield from leaves(one, each, f"{where}[{i}]")


def _require(value: Any, kind: type, word: str, where: str) -> None:
    if not isinstance(value, kind): raise ShapeError(f"{where} is {_describe(value)}", word)


def _describe(value: Any) -> str: return "None" if value is None else f"a {type(value).__name__}"


def fields(annotation: Any) -> list[tuple[str, Any]]:
    """The fields of a named tuple, a dataclass or a TypedDict."""
    if not isinstance(annotation, type): return []
    if not (dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields")
            or hasattr(annotation, "__total__")): return []
    space = vars(inspect.getmodule(annotation)) if inspect.getmodule(annotation) else {}
    def read(given: Any) -> Any:
        if isinstance(given, typing.ForwardRef): given = given.__forward_arg__
        if not isinstance(given, str) or not any(name in given for name in NAMES): return given
        return eval(given, space)
    return [(name, read(each)) for name, each in vars(annotation).get("__annotations__", {}).items()]


@dataclass(frozen=True)
class _Extents:
    """Extents of a cache of kvcache/: the names of its kind."""
    shape: tuple[int, ...]
    dtype: Any


def _tensor(own: TensorType, value: Any, where: str) -> Any:
    if own.kind == "KVCache":
        if (kind := getattr(value, "kind", None)) is not None:
            shape = value.max_requests, value.heads, value.max_length, value.d
            return _Extents(shape, kind.dtype)
        value = getattr(value, "K", value)
    if hasattr(value, "shape") and hasattr(value, "dtype"): return value
    raise ShapeError(f"{where} is {_describe(value)}", f"a Tensor: {own}")

