"""Expressions of tile/expression.py in C, over the lanes of a vector.

Protocol: lanes are elements side by side along n, of one row m. `statements` gives C that computes an
expression for `W` of them and the name of the result, a `vf` for floats, else a `vi`; the caller stores it
with store_{short(root.dtype)}, which rounds. Every node is rounded to its dtype, as expression.py says,
except that float32 products and sums may be contracted. Integers of 8 and 16 bits wrap. `max` and `min`
prefer a number to NaN.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.kernel import C_TYPES
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, nearest, short, walk

UNSUPPORTED = ("sin",)  # its reduction of large arguments is not worth a copy of a mathematical library
_FLOAT = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "reciprocal": "1.f / {0}",
          "exp2": "exp2_({0})", "log2": "log2_({0})", "sqrt": "sqrt_({0})",
          "max": "pick({0} != {0}, {1}, max_({1}, {0}))", "min": "pick({0} != {0}, {1}, min_({1}, {0}))"}
_INTEGER = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "and": "{0} & {1}", "or": "{0} | {1}",
            "xor": "{0} ^ {1}", "max": "pick_i({0} > {1}, {0}, {1})", "min": "pick_i({0} < {1}, {0}, {1})"}
_BOOL = {"add": "{0} | {1}", "mul": "{0} & {1}", "max": "{0} | {1}", "min": "{0} & {1}", "and": "{0} & {1}",
         "or": "{0} | {1}", "xor": "{0} ^ {1}", "not_equal": "{0} ^ {1}", "less": "~{0} & {1}"}


def problems(root: Expression) -> list[str]:
    """Why an expression cannot be computed; empty when it can."""
    nodes = list(walk(root))
    out = [f"an epilogue with {dtype.name}" for dtype in dict.fromkeys(node.dtype for node in nodes)
           if short(dtype) not in C_TYPES]
    out += [f"{op} in an epilogue" for op in UNSUPPORTED
            if any(isinstance(node, Apply) and node.op == op for node in nodes)]
    return out


@dataclass(frozen=True)
class Place:
    """Where the lanes are, in C: row `m`, first column `n`, index of each dimension of the batch, and how
    many lanes count ("" for all). `sums` are the vectors of the parts; pointers to parameters are called x0,
    x1, … `row` is the row that loads take, where that is not m."""
    sums: Sequence[str]
    m: str
    n: str
    batch: Sequence[str] = ()
    count: str = ""
    start: str = "0"
    row: str = ""


def statements(root: Expression, place: Place, prefix: str = "t") -> tuple[list[str], str]:
    """C that computes an expression at a place, a line a node, and the name of its value."""
    names: dict[Expression, str] = {}
    lines = []
    for number, node in enumerate(walk(root)):
        if isinstance(node, Sum):
            names[node] = place.sums[node.part]
            continue
        names[node] = name = f"{prefix}{number}"
        lines.append(f"{_vector(node.dtype)} {name} = {_value(node, names, place)};")
    return lines, names[root]


def _vector(dtype: DType) -> str: return "vf" if dtypes.is_float(dtype) else "vi"


def _value(node: Expression, names: dict[Expression, str], place: Place) -> str:
    if isinstance(node, Load): return _load(node, place)
    if isinstance(node, Position): return _position(node, place)
    if isinstance(node, Constant): return _constant(node)
    assert isinstance(node, Apply)
    args = [names[arg] for arg in node.args]
    source = node.args[-1].dtype
    if node.op == "cast": return _cast(args[0], source, node.dtype)
    if node.op == "where":
        chosen = "pick" if dtypes.is_float(node.dtype) else "pick_i"
        return f"{chosen}({', '.join(args)})"
    if source == dtypes.bool: return _BOOL[node.op].format(*args)
    if node.op in ("less", "not_equal"):
        sign = "<" if node.op == "less" else "!="
        if source == dtypes.uint32 and sign == "<": args = [f"({arg} ^ (s32)0x80000000)" for arg in args]
        return f"{args[0]} {sign} {args[1]}"
    if dtypes.is_float(node.dtype): return _rounded(_FLOAT[node.op].format(*args), node)
    if node.dtype == dtypes.uint32 and node.op in ("max", "min"):
        a, b = (f"({arg} ^ (s32)0x80000000)" for arg in args)
        return f"pick_i({a} {'>' if node.op == 'max' else '<'} {b}, {args[0]}, {args[1]})"
    return _rounded(_INTEGER[node.op].format(*args), node)


def _rounded(text: str, node: Apply) -> str:
    # the largest of two numbers of a dtype is one of it
    if node.dtype == dtypes.float32 or node.op in ("max", "min"): return text
    return f"round_{short(node.dtype)}({text})"


def _cast(value: str, source: DType, to: DType) -> str:
    if to == dtypes.bool: return f"{value} != 0"
    if source == dtypes.bool: value, source = f"({value} & 1)", dtypes.int32
    if dtypes.is_float(source) and dtypes.is_float(to):
        return value if to == dtypes.float32 else f"round_{short(to)}({value})"
    if dtypes.is_float(source):
        # of unsigned numbers above 2^31 too
        if to == dtypes.uint32: return f"(vi)__builtin_convertvector({value}, vu)"
        return f"round_{short(to)}(to_i({value}))"
    if dtypes.is_float(to):
        made = f"__builtin_convertvector((vu){value}, vf)" if source == dtypes.uint32 else f"to_f({value})"
        return made if to == dtypes.float32 else f"round_{short(to)}({made})"
    return f"round_{short(to)}({value})"


def _constant(node: Constant) -> str:
    if node.dtype == dtypes.bool: return f"(vi){-1 if node.value else 0}"
    if not dtypes.is_float(node.dtype):
        value = int(node.value) & 0xFFFFFFFF
        return f"(vi)(s32){value:#x}"
    return f"(vf){c_float(nearest(float(node.value), node.dtype))}"


def c_float(value: float) -> str:
    """A number as a float32 literal of C, exactly."""
    if value != value: return '__builtin_nanf("")'
    if value in (float("inf"), float("-inf")): return ("-" if value < 0 else "") + "__builtin_inff()"
    return f"{value.hex()}f"


def _position(node: Position, place: Place) -> str:
    if node.axis == "m": return f"(vi)({place.m})"
    if node.axis == "n": return f"(vi)({place.n}) + iota_()"
    if node.axis == "start": return f"(vi)({place.start})"
    return f"(vi)({place.batch[int(node.axis)]})"


def _load(node: Load, place: Place) -> str:
    terms = [f"(s64)({place.row or place.m}) * {node.m}"] if node.m else []
    if node.n: terms.append(f"(s64)({place.n}) * {node.n}")
    terms += [f"(s64)({at}) * {stride}" for at, stride in zip(place.batch, node.batch, strict=False)
              if stride]
    if node.offset or not terms: terms.append(str(node.offset))
    where, name = f"x{node.parameter} + {' + '.join(terms)}", short(node.dtype)
    if not node.n: return f"({_vector(node.dtype)})one_{name}({where})"
    if node.n != 1: return f"strided_{name}({where}, {node.n}, {place.count or 'W'})"
    return f"load_n_{name}({where}, {place.count})" if place.count else f"load_{name}({where})"
