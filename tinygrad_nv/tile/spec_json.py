"""Specs as plain data and back: those of families that are tuned.

Protocol: `spec_to_json(spec)` is JSON's dicts, lists, strings and numbers, and `spec_from_json` gives an
equal spec or raises `SpecError`. An expression is a list of nodes, arguments before those that use them and
named by their numbers, the last one the whole: a node used twice is written once. Numbers that JSON lacks
(inf, nan) are strings. A matmul has no `kind`; other specs have their fields as they are.
"""
from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, short, walk
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result

DTYPES = {short(dtype): dtype for dtype in (
    dtypes.bool, dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16, dtypes.int32, dtypes.uint32,
    dtypes.int64, dtypes.uint64, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.float16, dtypes.bfloat16,
    dtypes.float32, dtypes.float64)}
EXTENTS = ("m", "n", "k", "parts", "part")
# type of spec: its module in this folder, imported when one is read
KINDS = {"AttentionSpec": "attention.spec", "BackwardSpec": "attention.backward_spec",
         "DecodeSpec": "decode.spec", "ScaledGemmSpec": "scaled_gemm.spec",
         "KernelSpec": "language.searched"}
TUNED = ("GemmSpec", *KINDS)


def is_tuned(spec: Any) -> bool:
    """Tells whether a spec is of a type whose schedules are found by trying."""
    return type(spec).__name__ in TUNED


def _type_of(kind: str) -> Any: return getattr(import_module(f"tinygrad_nv.tile.{KINDS[kind]}"), kind)


def spec_to_json(spec: Any) -> dict[str, Any]:
    """A spec as plain data."""
    if type(spec) is GemmSpec: return _matmul_to_json(spec)
    return {"kind": type(spec).__name__, **to_plain(spec)}


def _matmul_to_json(spec: GemmSpec) -> dict[str, Any]:
    def operand(place: Operand) -> dict[str, Any]:
        return {"dtype": short(place.dtype), "mn": place.mn, "k": place.k, "batch": list(place.batch),
                "offset": place.offset}
    out = {"dtype": short(spec.out.dtype), "m": spec.out.m, "n": spec.out.n, "batch": list(spec.out.batch),
           "offset": spec.out.offset}
    return {**{name: getattr(spec, name) for name in EXTENTS}, "a": operand(spec.a), "b": operand(spec.b),
            "out": out, "batch": list(spec.batch), "epilogue": _nodes(spec.epilogue),
            "symbolic": spec.symbolic, "tf32": spec.tf32}


def _nodes(root: Expression) -> list[dict[str, Any]]:
    numbers: dict[Expression, int] = {}
    made: list[dict[str, Any]] = []
    for node in walk(root):
        numbers[node] = len(made)
        made.append({"dtype": short(node.dtype), **_node(node, numbers)})
    return made


def _node(node: Expression, numbers: dict[Expression, int]) -> dict[str, Any]:
    if isinstance(node, Sum): return {"kind": "sum", "part": node.part}
    if isinstance(node, Constant):
        finite = not isinstance(node.value, float) or math.isfinite(node.value)
        return {"kind": "constant", "value": node.value if finite else str(node.value)}
    if isinstance(node, Position): return {"kind": "position", "axis": node.axis}
    if isinstance(node, Load):
        return {"kind": "load", "parameter": node.parameter, "m": node.m, "n": node.n,
                "batch": list(node.batch), "offset": node.offset}
    assert isinstance(node, Apply)
    return {"kind": node.op, "args": [numbers[arg] for arg in node.args]}


def spec_from_json(data: Any) -> Any:
    """The spec of plain data. Raises `SpecError` for what is none."""
    try:
        if not isinstance(data, dict) or "kind" not in data: return _matmul(data)
        kind = _type_of(data["kind"])
        return from_plain(kind, {name: each for name, each in data.items() if name != "kind"})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SpecError(f"{str(data)[:200]} is no spec: {type(error).__name__} {error}",
                        "what spec_to_json makes", "export it again") from error


def _matmul(data: Any) -> GemmSpec:
    a, b = (Operand(_dtype(data[x]["dtype"]), _int(data[x]["mn"]), _int(data[x]["k"]),
                    _ints(data[x]["batch"]), _int(data[x]["offset"])) for x in "ab")
    o = data["out"]
    out = Result(_dtype(o["dtype"]), _int(o["m"]), _int(o["n"]), _ints(o["batch"]), _int(o["offset"]))
    extents = {name: _int(data[name]) for name in EXTENTS}
    return GemmSpec(a=a, b=b, out=out, batch=_ints(data["batch"]), epilogue=_expression(data["epilogue"]),
                    symbolic=_bool(data["symbolic"]), tf32=_bool(data["tf32"]), **extents)


def _expression(nodes: list[dict[str, Any]]) -> Expression:
    made: list[Expression] = []
    for node in nodes:
        kind, dtype = node["kind"], _dtype(node["dtype"])
        if kind == "sum": made.append(Sum(dtype, _int(node["part"])))
        elif kind == "constant": made.append(Constant(_number(node["value"]), dtype))
        elif kind == "position": made.append(Position(_axis(node["axis"]), dtype))
        elif kind == "load":
            made.append(Load(_int(node["parameter"]), dtype, _int(node["m"]), _int(node["n"]),
                             _ints(node["batch"]), _int(node["offset"])))
        else:
            args = _ints(node["args"])
            if any(not 0 <= arg < len(made) for arg in args): raise IndexError(f"arguments {args}")
            made.append(Apply(kind, tuple(made[arg] for arg in args), dtype))
    return made[-1]


# **** values ****

def _dtype(name: Any) -> DType: return DTYPES[name]


def _int(value: Any) -> int:
    if type(value) is not int: raise TypeError(f"{value!r} is not an integer")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool: raise TypeError(f"{value!r} is neither true nor false")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if type(values) is not list: raise TypeError(f"{values!r} is not a list")
    return tuple(map(_int, values))


def _number(value: Any) -> float | int | bool:
    if type(value) is str and value in ("inf", "-inf", "nan"): return float(value)
    if type(value) not in (int, float, bool): raise TypeError(f"{value!r} is not a number")
    number: float | int | bool = value
    return number


def _axis(value: Any) -> Any:
    if value not in ("m", "n") and type(value) is not int: raise TypeError(f"{value!r} is no axis")
    return value


# **** fields of any spec ****

def to_plain(value: Any) -> Any:
    """A dataclass, dtype, expression or tuple as plain data; other values as they are."""
    if isinstance(value, DType): return short(value)
    if isinstance(value, Expression): return _nodes(value)
    if isinstance(value, tuple): return [*map(to_plain, value)]
    if is_dataclass(value): return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    return value


def from_plain(hint: Any, value: Any) -> Any:
    """A value of plain data, of the type that a field is annotated with. Raises KeyError, TypeError or
    ValueError for what is none."""
    arguments = get_args(hint)
    if isinstance(hint, UnionType):     # of something and None
        return None if value is None else from_plain(arguments[0], value)
    if get_origin(hint) is Literal:
        if value not in arguments: raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if get_origin(hint) is tuple:
        if type(value) is not list: raise TypeError(f"{value!r} is not a list")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(from_plain(kind, each) for kind, each in zip(kinds, value, strict=True))
    if hint is DType: return _dtype(value)
    if hint is Expression: return _expression(value)
    if is_dataclass(hint): return _read_fields(hint, value)
    if type(value) is not hint: raise TypeError(f"{value!r} is not of type {hint.__name__}")
    return value


def _read_fields(cls: Any, data: dict[str, Any]) -> Any:
    hints = get_type_hints(cls)
    names = {each.name for each in fields(cls)}
    if data.keys() != names: raise KeyError(", ".join(sorted(data.keys() ^ names)))
    return cls(**{name: from_plain(hints[name], data[name]) for name in names})
