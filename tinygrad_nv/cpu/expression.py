"""Expressions of tile/expression.py in C, over the lanes of a vector.

Protocol: lanes are elements side by side along n, of one row m. `statements` gives C that computes an
expression for `W` of them and the name of the result, a `vf` for floats, else a `vi`; the caller stores it
with store_{short(root.dtype)}, which rounds. Every node is rounded to its dtype, as expression.py says,
except that float32 products and sums may be contracted. Integers of 8 and 16 bits wrap. A NaN that
comes first stays in `max` and `min`, as in tinygrad's C.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.kernel import C_TYPES
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, nearest, short, walk
from tinygrad_nv.tile.operations import OPERATIONS


def problems(root: Expression) -> list[str]:
    """Why an expression cannot be computed; empty when it can."""
    nodes = list(walk(root))
    out = [f"an epilogue with {dtype.name}" for dtype in dict.fromkeys(node.dtype for node in nodes)
           if short(dtype) not in C_TYPES]
    applied = dict.fromkeys((node.op, node.args[-1].dtype) for node in nodes if isinstance(node, Apply))
    absent = [(op, dtype) for op, dtype in applied if op != "cast" and not OPERATIONS[op].c(dtype)]
    words = [f"{op} of {short(dtype)}" if OPERATIONS[op].on_cpu else op for op, dtype in absent]
    return out + [f"{each} in an epilogue" for each in dict.fromkeys(words)]


@dataclass(frozen=True)
class LanePlace:
    """Place of the lanes, in C: row `m`, first column `n`, index of each dimension of the batch, and how many
    lanes count (\"\" for all). `sums` are the vectors of the parts; pointers to parameters are called x0, x1,
    … `row` is the row that loads take, where that is not m."""
    sums: Sequence[str]
    m: str
    n: str
    batch: Sequence[str] = ()
    count: str = ""
    start: str = "0"
    row: str = ""


def statements(root: Expression, place: LanePlace, prefix: str = "t") -> tuple[list[str], str]:
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


def _value(node: Expression, names: dict[Expression, str], place: LanePlace) -> str:
    if isinstance(node, Load): return _load(node, place)
    if isinstance(node, Position): return _position(node, place)
    if isinstance(node, Constant): return constant_text(node)
    assert isinstance(node, Apply)
    args = [names[arg] for arg in node.args]
    source, op = node.args[-1].dtype, OPERATIONS[node.op]
    if node.op == "cast": return cast_text(args[0], source, node.dtype)
    assert op.c(source), f"problems() names {node.op} of {short(source)}"
    text = op.c(source).format(*args)
    exact = op.exact or op.compares or source == dtypes.bool or node.dtype == dtypes.float32
    return text if exact else f"round_{short(node.dtype)}({text})"


def cast_text(value: str, source: DType, to: DType) -> str:
    """C of a vector's value converted to another dtype."""
    if to == dtypes.bool: return f"{value} != 0"
    if source == dtypes.bool: value, source = f"({value} & 1)", dtypes.int32
    if dtypes.is_float(source) and dtypes.is_float(to):
        return value if to == dtypes.float32 else f"round_{short(to)}({value})"
    if dtypes.is_float(source):
        if to == dtypes.uint32: return f"to_u({value})"
        return f"round_{short(to)}(to_i({value}))"
    if dtypes.is_float(to):
        made = f"__builtin_convertvector((vu){value}, vf)" if source == dtypes.uint32 else f"to_f({value})"
        return made if to == dtypes.float32 else f"round_{short(to)}({made})"
    return f"round_{short(to)}({value})"


def constant_text(node: Constant) -> str:
    """C of a vector of one number."""
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


def _position(node: Position, place: LanePlace) -> str:
    if node.axis == "m": return f"(vi)({place.m})"
    if node.axis == "n": return f"(vi)({place.n}) + iota_()"
    if node.axis == "start": return f"(vi)({place.start})"
    return f"(vi)({place.batch[int(node.axis)]})"


def _load(node: Load, place: LanePlace) -> str:
    terms = [f"(s64)({place.row or place.m}) * {node.m}"] if node.m else []
    if node.n: terms.append(f"(s64)({place.n}) * {node.n}")
    terms += [f"(s64)({at}) * {stride}" for at, stride in zip(place.batch, node.batch, strict=False)
              if stride]
    if node.offset or not terms: terms.append(str(node.offset))
    where, name = f"x{node.parameter} + {' + '.join(terms)}", short(node.dtype)
    if not node.n: return f"({_vector(node.dtype)})one_{name}({where})"
    if node.n != 1: return f"strided_{name}({where}, {node.n}, {place.count or 'W'})"
    return f"load_n_{name}({where}, {place.count})" if place.count else f"load_{name}({where})"
