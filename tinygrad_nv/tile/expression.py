"""Expressions of an epilogue: over sums, loads and constants, element by element, before a sum is stored.

Protocol: expressions are frozen trees, equal when they compute the same in the same way. Every node has the
dtype the graph gave it and its value is rounded to that dtype, as tinygrad's own kernels do: a float16 `add`
is a float32 addition of the two, rounded to float16 (which is the correctly rounded sum, as 24 ≥ 2 · 11 + 2
bits). On a GPU ptxas may leave a float32 product unrounded for an addition after it (fused multiply-add), in
these kernels as in tinygrad's; the emulator rounds it. Booleans are results of `less` and `not_equal`.
Positions are int32.

`walk` visits each node once, arguments first. `loads` and `parameters` say what an expression reads.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.operations import OPERATIONS

SHOWN = 500     # nodes of a tree that is written out


class Expression:
    """A node. Operators make nodes of the left side's dtype; a Python number becomes a constant of it."""
    dtype: DType

    def _with(self, op: str, other: Expression | float, swap: bool = False) -> Apply:
        right = other if isinstance(other, Expression) else Constant(other, self.dtype)
        args = (right, self) if swap else (self, right)
        return Apply(op, args, dtypes.bool if OPERATIONS[op].compares else self.dtype)

    def __add__(self, other: Expression | float) -> Apply: return self._with("add", other)

    def __radd__(self, other: float) -> Apply: return self._with("add", other, swap=True)

    def __sub__(self, other: Expression | float) -> Apply: return self._with("sub", other)

    def __mul__(self, other: Expression | float) -> Apply: return self._with("mul", other)

    def __rmul__(self, other: float) -> Apply: return self._with("mul", other, swap=True)

    def __lt__(self, other: Expression | float) -> Apply: return self._with("less", other)

    def __gt__(self, other: Expression | float) -> Apply: return self._with("less", other, swap=True)

    def maximum(self, other: Expression | float) -> Apply: return self._with("max", other)

    def reciprocal(self) -> Apply: return Apply("reciprocal", (self,), self.dtype)

    def exp2(self) -> Apply: return Apply("exp2", (self,), self.dtype)

    def sin(self) -> Apply: return Apply("sin", (self,), self.dtype)

    def cast(self, dtype: DType) -> Expression:
        return self if dtype == self.dtype else Apply("cast", (self,), dtype)

    # sums, products and choices of float32, without what can be computed here or changes nothing

    def plus(self, other: Expression) -> Expression:
        """self + other."""
        if other == ZERO: return self
        if isinstance(self, Constant) and isinstance(other, Constant):
            return Constant(float(self.value) + float(other.value))
        return other if self == ZERO else Apply("add", (self, other), dtypes.float32)

    def minus(self, other: Expression) -> Expression:
        """self - other."""
        if ZERO in (self, other) or (isinstance(self, Constant) and isinstance(other, Constant)):
            return self.plus(other.times(Constant(-1.0)))
        return Apply("sub", (self, other), dtypes.float32)

    def times(self, other: Expression) -> Expression:
        """self · other."""
        a, b = (other, self) if isinstance(self, Constant) else (self, other)
        if isinstance(b, Constant):
            number = float(b.value)
            if number in (0.0, 1.0): return a if number else ZERO
            if isinstance(a, Constant): return Constant(float(a.value) * number)
            if isinstance(a, Apply) and a.op == "mul" and isinstance(a.args[1], Constant):
                return a.args[0].times(Constant(float(a.args[1].value) * number))
        return Apply("mul", (a, b), dtypes.float32)

    def either(self, yes: Expression, no: Expression) -> Expression:
        """`yes` where this condition holds, else `no`."""
        return yes if yes == no else where(self, yes, no)


@dataclass(frozen=True)
class Sum(Expression):
    """The sum of products of this element; of part `part` where the right operand has several."""
    dtype: DType = dtypes.float32
    part: int = 0


@dataclass(frozen=True)
class Load(Expression):
    """An element of the further parameter number `parameter`, at `offset + m · row + n · column + batch`
    strides, in elements: a bias has stride 0 along rows, a residual neither."""
    parameter: int
    dtype: DType
    m: int
    n: int
    batch: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Constant(Expression):
    """A number of the dtype."""
    value: float | int | bool
    dtype: DType = dtypes.float32


ZERO = Constant(0.0)


@dataclass(frozen=True)
class Position(Expression):
    """The index of this element along rows, columns, or a dimension of the batch; of attention also where row
    0 stands among the columns, "start"."""
    axis: Literal["m", "n", "start"] | int
    dtype: DType = dtypes.int32


@dataclass(frozen=True)
class Apply(Expression):
    """An operation of operations.py. `where` takes a condition first."""
    op: str
    args: tuple[Expression, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if (known := OPERATIONS.get(self.op)) is None or known.arity != len(self.args):
            operations = ", ".join(f"{each.name}/{each.arity}" for each in OPERATIONS.values())
            raise SpecError(f"operation {self.op!r} with {len(self.args)} arguments", f"one of {operations}")
        # once: a node used twice would otherwise be walked twice, and so on down
        object.__setattr__(self, "_hash", hash((self.op, self.args, self.dtype)))
        object.__setattr__(self, "_size", 1 + sum(map(tree_size, self.args)))

    def __hash__(self) -> int:
        made: int = self.__dict__["_hash"]
        return made

    def __repr__(self) -> str:
        if tree_size(self) > SHOWN: return f"Apply({_digest(self)})"
        return f"Apply(op={self.op!r}, args={self.args!r}, dtype={self.dtype!r})"

    def __eq__(self, other: object) -> bool:
        """Whether they compute the same in the same way. Each pair of nodes is compared once: nodes that are
        used twice, and so on down, are as many as paths are not."""
        if not isinstance(other, Apply): return NotImplemented
        seen, open_ = set[tuple[int, int]](), [(self, other)]
        while open_:
            a, b = open_.pop()
            if a is b or (id(a), id(b)) in seen: continue
            seen.add((id(a), id(b)))
            if (a.op, a.dtype, len(a.args)) != (b.op, b.dtype, len(b.args)): return False
            for x, y in zip(a.args, b.args, strict=True):
                if isinstance(x, Apply) and isinstance(y, Apply): open_.append((x, y))
                elif x != y: return False
        return True

    def __reduce__(self) -> tuple[type[Apply], tuple[str, tuple[Expression, ...], DType]]:
        return Apply, (self.op, self.args, self.dtype)  # another process hashes otherwise


def walk(root: Expression, seen: set[Expression] | None = None) -> Iterator[Expression]:
    """Every node once, arguments before those that use them."""
    seen = set() if seen is None else seen
    if root in seen: return
    seen.add(root)
    if isinstance(root, Apply):
        for arg in root.args: yield from walk(arg, seen)
    yield root


def substitute(root: Expression, known: Mapping[Expression, Expression]) -> Expression:
    """An expression with others in the place of some of its nodes. A node used twice stays one."""
    made = dict(known)
    for node in walk(root):
        if node in made: continue
        if isinstance(node, Apply): made[node] = replace(node, args=tuple(made[arg] for arg in node.args))
        else: made[node] = node
    return made[root]


def transpose(root: Expression) -> Expression:
    """An expression whose rows and columns have changed places. A node used twice stays one."""
    made: dict[Expression, Expression] = {}
    for node in walk(root):
        if isinstance(node, Apply): made[node] = replace(node, args=tuple(made[arg] for arg in node.args))
        elif isinstance(node, Load): made[node] = replace(node, m=node.n, n=node.m)
        elif isinstance(node, Position) and node.axis == "m": made[node] = Position("n")
        elif isinstance(node, Position) and node.axis == "n": made[node] = Position("m")
        else: made[node] = node
    return made[root]


def loads(root: Expression) -> tuple[Load, ...]:
    """The loads of an expression, each once."""
    return tuple(node for node in walk(root) if isinstance(node, Load))


def parameters(*roots: Expression) -> tuple[DType, ...]:
    """The dtypes of the further parameters of expressions, in their order. Raises `SpecError` for a gap or
    two dtypes."""
    found: dict[int, DType] = {}
    for load in (load for root in roots for load in loads(root)):
        if found.setdefault(load.parameter, load.dtype) != load.dtype:
            raise SpecError(f"parameter {load.parameter} of {found[load.parameter]} and {load.dtype}",
                            "one dtype for a parameter")
    if sorted(found) != list(range(len(found))):
        raise SpecError(f"parameters {sorted(found)}", "parameters counted from 0")
    return tuple(found[i] for i in range(len(found)))


# bits of mantissa behind the first, exponent of the smallest normal number, largest finite number
FLOATS = {dtypes.float16: (10, -14, 65504.0), dtypes.bfloat16: (7, -126, 255 * 2.0**120),
          dtypes.float32: (23, -126, (2**24 - 1) * 2.0**104), dtypes.fp8e4m3: (3, -6, 448.0),
          dtypes.fp8e5m2: (2, -14, 57344.0)}


def nearest(value: float, dtype: DType) -> float:
    """The number of a float dtype nearest to `value`, ties to even. Too large becomes infinite, in 8 bits
    the largest finite number."""
    mantissa, smallest, largest = FLOATS[dtype]
    if math.isnan(value) or value == 0: return value
    if math.isfinite(value):
        step = max(math.frexp(value)[1] - 1, smallest) - mantissa
        value = math.ldexp(round(math.ldexp(value, -step)), step) or math.copysign(0.0, value)
    over = largest if dtype.itemsize == 1 else math.inf
    return value if abs(value) <= largest else math.copysign(over, value)


def short(dtype: DType) -> str:
    """A dtype's name as the field writes it: bf16, f32, e4m3, s8."""
    if dtype in (dtypes.fp8e4m3, dtypes.fp8e5m2): return "e4m3" if dtype == dtypes.fp8e4m3 else "e5m2"
    if dtype in (dtypes.bool, dtypes.bfloat16): return "bool" if dtype == dtypes.bool else "bf16"
    kind = "f" if dtypes.is_float(dtype) else "u" if dtypes.is_unsigned(dtype) else "s"
    return f"{kind}{8 * dtype.itemsize}"


def show(node: Expression, names: Mapping[Expression, str] | None = None) -> str:
    """An expression as text, for a reader; nodes in `names` by their names. Of one that is too long as a tree
    the number of its operations, and a word that tells it from others."""
    return _digest(node) if tree_size(node) > SHOWN else _show(node, names or {})


def tree_size(node: Expression) -> int:
    """The nodes of an expression, those that are used twice counted as often."""
    size: int = node.__dict__["_size"] if isinstance(node, Apply) else 1
    return size


def _digest(root: Expression) -> str:
    """An expression in short: as text, a node that is used twice, and so on down, would not end."""
    places = {node: i for i, node in enumerate(walk(root))}
    lines = [f"{node.op} {[places[arg] for arg in node.args]} {node.dtype}" if isinstance(node, Apply)
             else repr(node) for node in places]
    return f"{len(lines)} operations, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def _show(node: Expression, names: Mapping[Expression, str]) -> str:
    """A short expression as text."""
    if node in names: return names[node]
    if isinstance(node, Sum): return f"sum{node.part or ''}"
    if isinstance(node, Constant): return f"{node.value:g}"
    if isinstance(node, Position): return node.axis if isinstance(node.axis, str) else f"batch{node.axis}"
    if isinstance(node, Load):
        strides = (("m", node.m), ("n", node.n), ("b", any(node.batch)))
        where = "".join(axis for axis, stride in strides if stride)
        return f"x{node.parameter}[{where}]"
    assert isinstance(node, Apply)
    if node.op == "cast": return f"{_show(node.args[0], names)}.{short(node.dtype)}"
    args = [_show(arg, names) for arg in node.args]
    if sign := OPERATIONS[node.op].sign: return f"({args[0]} {sign} {args[1]})"
    return f"{node.op}({', '.join(args)})"


# **** activations, node by node as tinygrad spells them ****

def relu(x: Expression) -> Expression:
    """x where it is above 0, else 0: also of NaN."""
    return where(x > 0.0, x, 0.0)


def sigmoid(x: Expression) -> Expression:
    """1 / (1 + exp(-x))."""
    return (1.0 + (x * -1.4426950408889634).exp2()).reciprocal()


def silu(x: Expression) -> Expression:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def quick_gelu(x: Expression) -> Expression:
    """x · sigmoid(1.702 x)."""
    return x * sigmoid(x * 1.702)


def tanh(x: Expression) -> Expression:
    """2 sigmoid(2x) - 1."""
    return 2.0 * sigmoid(2.0 * x) + Constant(1.0, x.dtype) * -1.0


def gelu_tanh(x: Expression) -> Expression:
    """x / 2 · (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³)))."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


def gelu(x: Expression) -> Expression:
    """x / 2 · (1 + erf(x / sqrt 2))."""
    return x * 0.5 * (1.0 + erf(x * Constant(1.4142135623730951, x.dtype).reciprocal()))


def erf(x: Expression) -> Expression:
    """The error function by Abramowitz and Stegun 7.1.26, good to 1.5e-7."""
    sign = where(Apply("not_equal", (x, Constant(0.0, x.dtype)), dtypes.bool),
                 where(x < 0.0, Constant(-1.0, x.dtype), 1.0), 0.0)
    t = 1.0 * (1.0 + 0.3275911 * (x * sign)).reciprocal()
    series: Expression = Constant(0.0, x.dtype)
    for term in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + term
    return sign * (1.0 + t * series * exp(x * x * -1.0) * -1.0)


def exp(x: Expression) -> Expression:
    """exp(x), of 16-bit floats in float32."""
    return (x.cast(dtypes.float32) * 1.4426950408889634).exp2().cast(x.dtype)


def where(condition: Expression, yes: Expression, no: Expression | float) -> Apply:
    """`yes` where the condition holds, else `no`."""
    other = no if isinstance(no, Expression) else Constant(no, yes.dtype)
    return Apply("where", (condition, yes, other), yes.dtype)
