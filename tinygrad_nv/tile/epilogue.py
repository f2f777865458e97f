"""The epilogue in instructions: an expression of expression.py over elements whose sums are in registers.

Protocol: a `Finish` evaluates pairs, two elements that are neighbours in a row; a pair is named by two
numbers of the caller's, one for its row and one for its columns. What does not depend on the row (or the
columns) is computed once for all pairs of the same columns (or row), where it is first needed: all code of
one `Finish` must be in one straight line. `finished` is the same for one element.

Floats are computed in float32 and rounded to the node's dtype, unless that changes nothing: sums, products
and choices of 16-bit floats are computed two at a time by instructions that round once, which gives the same
bits. As in tinygrad's own kernels, products and sums of float32 may be contracted, `max` and `min` prefer a
number to NaN, exp2, log2 and sin are the approximations of the hardware; reciprocals and square roots of
float32 are rounded to nearest. Integers of 8 and 16 bits wrap.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, mul, sub
from typing import Protocol

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import read, write
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, nearest, walk
from tinygrad_nv.tile.lanes import (
    FP8,
    HALVES,
    SUPPORTED,
    Lanes,
    Number,
    converted,
    kind_of,
    rounded,
    wrapped,
)

# operations whose results are among the arguments
EXACT = ("max", "min", "where")
LOGIC = {"and": "and", "or": "or", "xor": "xor", "not_equal": "xor", "add": "or", "mul": "and", "max": "or",
         "min": "and"}
UNARY = {"reciprocal": "rcp.approx.f32", "exp2": "ex2.approx.f32", "log2": "lg2.approx.f32",
         "sqrt": "sqrt.rn.f32", "sin": "sin.approx.f32"}
FOLDED: dict[str, Callable[..., float]] = {"add": add, "sub": sub, "mul": mul,
                                           "reciprocal": lambda x: 1.0 / x}
# of these (and of rcp.approx) the error, a unit of float32, is far below a rounding to 16 bits
SHORT = {"sqrt": "sqrt.approx.f32"}
# bfloat16 before sm_90: a fused multiply-add with 1, -1 or -0
FUSED = {"add": 0x3F803F80, "sub": 0xBF80BF80, "mul": 0x80008000}


def problems(root: Expression, arch: str) -> list[str]:
    """Why an epilogue cannot be computed on an architecture; empty when it can."""
    out = [f"an epilogue with {dtype.name}" for dtype in dict.fromkeys(node.dtype for node in walk(root))
           if dtype not in SUPPORTED]
    if arch < "sm_89" and any(node.dtype in FP8 for node in walk(root)):
        out.append(f"8-bit floats in the epilogue: conversions begin with sm_89, this is {arch}")
    return out


class Sources(Protocol):
    """What an epilogue reads. All take the numbers of the pair's row and columns."""

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]:
        """The sums of the elements."""

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        """Elements of a further parameter; one where it is the same for both."""

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        """Indices, as s32; one where it is the same for both."""


@dataclass(frozen=True)
class Step:
    """A node, the numbers of its arguments' steps, and what it depends on."""
    node: Expression
    args: tuple[int, ...]
    on_row: bool
    on_columns: bool


def steps(*roots: Expression) -> list[Step]:
    """Expressions in the order of their evaluation; the last root comes last."""
    out: list[Step] = []
    number: dict[Expression, int] = {}
    for node in dict.fromkeys(node for root in roots for node in walk(root)):
        args = tuple(number[arg] for arg in node.args) if isinstance(node, Apply) else ()
        row, columns = isinstance(node, Sum), isinstance(node, Sum)
        if isinstance(node, Load): row, columns = bool(node.m), bool(node.n)
        if isinstance(node, Position): row, columns = node.axis == "m", node.axis == "n"
        number[node] = len(out)
        out.append(Step(node, args, row or any(out[i].on_row for i in args),
                        columns or any(out[i].on_columns for i in args)))
    return out


@dataclass
class Finish:
    """Evaluates `root` for pairs of elements; and what `before` has, which may share nodes with it."""
    k: Kernel
    root: Expression
    sources: Sources
    width: int = 2
    before: tuple[Expression, ...] = ()
    known: dict[tuple[int, int, int], Lanes] = field(default_factory=dict)
    factors: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if found := problems(self.root, self.k.arch):
            raise SpecError("; ".join(found), "dtypes that kernels of this architecture compute",
                            "leave the operation to tinygrad")
        self.steps = steps(*self.before, self.root)
        self.number = next(i for i, step in enumerate(self.steps) if step.node == self.root)

    def at(self, row: int, pair: int) -> Lanes:
        """The value of a pair: rounded to the root's dtype where that is a float of 16 bits or more."""
        return self._values(row, pair)[self.number]

    def all(self, row: int, pair: int) -> dict[Expression, Lanes]:
        """The values of all nodes of a pair."""
        return {step.node: value for step, value in zip(self.steps, self._values(row, pair), strict=True)}

    def _values(self, row: int, pair: int) -> list[Lanes]:
        values: list[Lanes] = []
        for number, step in enumerate(self.steps):
            key = (number, row if step.on_row else -1, pair if step.on_columns else -1)
            if key not in self.known:
                self.known[key] = self._made(step, [values[i] for i in step.args], row, pair,
                                             last=number == len(self.steps) - 1)
            values.append(self.known[key])
        return values

    def _made(self, step: Step, args: list[Lanes], row: int, pair: int, last: bool) -> Lanes:
        k, node = self.k, step.node
        if isinstance(node, Sum): return Lanes(k, node.dtype, list(self.sources.sums(node.part, row, pair)))
        if isinstance(node, Load): return self.sources.load(node, row, pair)
        if isinstance(node, Position):
            return Lanes(k, node.dtype, list(self.sources.position(node.axis, row, pair)))
        if isinstance(node, Constant): return Lanes(k, node.dtype, [constant(k, node)])
        assert isinstance(node, Apply)
        if node.op == "cast":
            # bytes of a result are made when they are stored
            if last and node.dtype in FP8:
                return Lanes(k, node.dtype, converted(args[0], dtypes.float32).each())
            return converted(args[0], node.dtype)
        if (folded := of_constants(k, node, args)) is not None: return folded
        if (argument := unchanged(node)) is not None: return args[argument]
        two = step.on_columns and self.width == 2
        if rectified(node): return self._float("max", node.dtype, args[1:], two)
        if node.op in ("less", "not_equal") or dtypes.is_int(node.dtype) or node.dtype == dtypes.bool or \
                node.op == "where": return self._plain(node, args, two)
        return self._float(node.op, node.dtype, args, two)

    # **** floats ****

    def _float(self, op: str, dtype: DType, args: list[Lanes], two: bool) -> Lanes:
        k = self.k
        if two and dtype in HALVES and op in ("add", "sub", "mul", "max", "min"):
            return Lanes(k, dtype, [], self._halves(op, HALVES[dtype], [arg.pair() for arg in args]))
        if op == "reciprocal" and dtype == dtypes.float32:
            return Lanes(k, dtype, each_lane(args, self._reciprocal))
        if op in UNARY: opcode = SHORT.get(op, UNARY[op]) if dtype != dtypes.float32 else UNARY[op]
        else: opcode = f"{op}.f32"
        wide = each_lane(args, lambda *operands: self._emitted(opcode, "f32", *operands))
        return Lanes(k, dtype, wide) if op in EXACT else rounded(k, wide, dtype)

    def _reciprocal(self, x: Number) -> Value:
        """1 / x to nearest: Newton's step, which is the fast path of rcp.rn, without a branch to its slow
        one. Where the step makes no sense (0, infinity, NaN) the approximation is exact."""
        short = self._emitted("rcp.approx.f32", "f32", x)
        error = self._emitted("fma.rn.f32", "f32", self._emitted("neg.f32", "f32", x), short, 1.0)
        made = self._emitted("fma.rn.f32", "f32", short, error, short)
        small = self._emitted("setp.lt.f32", "pred", self._emitted("abs.f32", "f32", error), 0.5)
        return self.k.select(small, made, short)

    def _halves(self, op: str, kind: str, args: list[Value]) -> Value:
        """An operation of two 16-bit floats at a time."""
        k = self.k
        if op in EXACT: return self._emitted(f"{op}.{kind}x2", "b32", *args)
        if kind == "f16" or k.arch >= "sm_90": return self._emitted(f"{op}.rn.{kind}x2", "b32", *args)
        if op not in self.factors: self.factors[op] = k.reg("b32", FUSED[op])
        factor = self.factors[op]
        a, b, c = {"add": (args[0], factor, args[1]), "sub": (args[1], factor, args[0]),
                   "mul": (args[0], args[1], factor)}[op]
        return self._emitted("fma.rn.bf16x2", "b32", a, b, c)

    def _emitted(self, opcode: str, kind: str, *operands: Number) -> Value:
        made = self.k.reg(kind)
        self.k.emit(opcode, made, *operands)
        return made

    # **** integers, booleans, comparisons, choices ****

    def _plain(self, node: Apply, args: list[Lanes], two: bool) -> Lanes:
        k, op = self.k, node.op
        if op == "where": return self._chosen(node.dtype, args, two)
        kind = kind_of(args[-1].dtype)
        if kind == "pred": return Lanes(k, node.dtype, each_lane(args, lambda a, b: self._logic(op, a, b)))
        if op in ("less", "not_equal"):
            # a NaN is not equal to anything, itself included
            test = "lt" if op == "less" else "neu" if kind == "f32" else "ne"
            return Lanes(k, node.dtype, each_lane(
                args, lambda a, b: self._emitted(f"setp.{test}.{kind}", "pred", a, b)))
        opcode = {"and": "and.b32", "or": "or.b32", "xor": "xor.b32",
                  "mul": f"mul.lo.{kind}"}.get(op, f"{op}.{kind}")
        made = each_lane(args, lambda a, b: self._emitted(opcode, kind, a, b))
        closed = op in (*EXACT, "and", "or", "xor")
        return Lanes(k, node.dtype, made if closed else [wrapped(k, each, node.dtype) for each in made])

    def _logic(self, op: str, a: Number, b: Number) -> Value:
        """Of predicates: a sum is either, a product both; less is false before true."""
        if op == "less": return self._emitted("and.pred", "pred", _not(a), b)
        return self._emitted(f"{LOGIC[op]}.pred", "pred", a, b)

    def _chosen(self, dtype: DType, args: list[Lanes], two: bool) -> Lanes:
        k, kind = self.k, kind_of(dtype)
        if kind == "pred":
            return Lanes(k, dtype, each_lane(args, lambda p, a, b: self._emitted(
                "or.pred", "pred", self._emitted("and.pred", "pred", p, a),
                self._emitted("and.pred", "pred", _not(p), b))))
        if two and dtype in HALVES and len(args[0].each()) == 1:
            return Lanes(k, dtype, [], k.select(args[0].register(), args[1].pair(), args[2].pair(), "b32"))
        return Lanes(k, dtype, each_lane(args, lambda p, a, b: self._emitted(f"selp.{kind}", kind, a, b, p)))


def _not(predicate: Number) -> Value:
    assert isinstance(predicate, Value)
    return ~predicate


def each_lane(args: Sequence[Lanes], make: Callable[..., Value]) -> list[Number]:
    """An operation for each element; once where no argument differs between them."""
    count = max(len(arg.each()) for arg in args)
    return [make(*(arg.at(i) for arg in args)) for i in range(count)]


def rectified(node: Apply) -> bool:
    """Whether a node is `0 < x ? x : 0`, which is max(x, 0) also where x is NaN or -0."""
    if node.op != "where" or not dtypes.is_float(node.dtype): return False
    test, x, otherwise = node.args
    nothing = Constant(0.0, node.dtype)
    return otherwise == nothing and test == Apply("less", (nothing, x), dtypes.bool)


def of_constants(k: Kernel, node: Apply, args: Sequence[Lanes]) -> Lanes | None:
    """What constants alone make, where they are floats and the operation is arithmetic."""
    numbers = [arg.wide[0] for arg in args if arg.wide and not isinstance(arg.wide[0], Value)]
    if node.op not in FOLDED or len(numbers) < len(args) or not dtypes.is_float(node.dtype): return None
    if node.op == "reciprocal" and numbers[0] == 0: return None
    return Lanes(k, node.dtype, [nearest(FOLDED[node.op](*map(float, numbers)), node.dtype)])


def unchanged(node: Apply) -> int | None:
    """The number of the argument that a node's value is, by the identities with which tinygrad simplifies its
    own kernels: x + 0, x · 1, and x · 0 for finite x."""
    if node.op not in ("add", "mul") or not dtypes.is_float(node.dtype): return None
    for i, arg in enumerate(node.args):
        value = arg.value if isinstance(arg, Constant) else None
        if (node.op, value) == ("mul", 0): return i
        if (node.op, value) in (("add", 0), ("mul", 1)): return 1 - i
    return None


def constant(k: Kernel, node: Constant) -> Number:
    """A constant as an operand: a predicate must be in a register."""
    if node.dtype == dtypes.bool: return k.reg("pred", int(node.value))
    if dtypes.is_float(node.dtype): return nearest(float(node.value), node.dtype)
    return wrapped(k, int(node.value), node.dtype)


# **** one element ****

@dataclass
class _Single:
    """The sources of one element, from functions."""
    k: Kernel
    values: Sequence[Value]
    loader: Callable[[Load], Value]
    index: Callable[[str | int], Value]

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: return [self.values[part]]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        return Lanes(self.k, load.dtype, [self.loader(load)])

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]: return [self.index(axis)]


def finished(k: Kernel, root: Expression, sums: Sequence[Value], load: Callable[[Load], Value],
             position: Callable[[str | int], Value]) -> Value:
    """The value of `root` for one element: f32 for floats (rounded to its dtype, but for 8-bit floats),
    s32 or u32 for integers, a predicate for booleans. `load` gives a load's element in the same form,
    `position` an index as s32."""
    return Finish(k, root, _Single(k, sums, load, position), width=1).at(0, 0).register()


def loaded(k: Kernel, pointer: Value, index: Value, dtype: DType) -> Value:
    """Element `index` (u64) of `dtype` in the form `finished` wants."""
    return read(k, pointer + index * dtype.itemsize, 0, dtype, 1).register()


def stored(k: Kernel, address: Value, value: Value, dtype: DType) -> None:
    """Stores a value of `finished` as one element of `dtype`."""
    write(k, address, 0, Lanes(k, dtype, [value]), 1)
