"""The epilogue in instructions: an expression of expression.py over elements whose sums are in registers.

Protocol: a `EpilogueEmitter` evaluates pairs, two elements that are neighbours in a row; a pair is named by
two numbers of the caller's, one for its row and one for its columns. What does not depend on the row (or the
columns) is computed once for all pairs of the same columns (or row), where it is first needed: all code of
one `EpilogueEmitter` must be in one straight line. `evaluate_element` is the same for one element.

Floats are computed in float32 and rounded to the node's dtype, unless that changes nothing: sums, products
and choices of 16-bit floats are computed two at a time by instructions that round once, which gives the same
bits. As in tinygrad's own kernels, products and sums of float32 may be contracted, `max` and `min` prefer a
number to NaN, exp2, log2 and sin are the approximations of the hardware; reciprocals and square roots of
float32 are rounded to nearest. Integers of 8 and 16 bits wrap. A quotient by a constant that only becomes an
integer or 8 bits is computed without a branch, and exact as far as these can tell.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import read, write
from tinygrad_nv.tile.expression import (
    FLOATS,
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Sum,
    nearest,
    short,
    walk,
)
from tinygrad_nv.tile.lanes import (
    FLOAT16S,
    FP8,
    SUPPORTED,
    Lanes,
    Number,
    bits16,
    convert,
    kind_of,
    round_floats,
    wrap,
)
from tinygrad_nv.tile.operations import OPERATIONS, Operation, fold


def problems(root: Expression, arch: str) -> list[str]:
    """Why an epilogue cannot be computed on an architecture; empty when it can."""
    nodes = list(walk(root))
    kinds = dict.fromkeys(node.dtype for node in nodes)
    out = [f"an epilogue with {dtype.name}" for dtype in kinds if dtype not in SUPPORTED]
    if arch < "sm_89" and any(dtype in FP8 for dtype in kinds):
        out.append(f"8-bit floats in the epilogue: conversions begin with sm_89, this is {arch}")
    applied = dict.fromkeys((node.op, node.args[-1].dtype) for node in nodes if isinstance(node, Apply))
    return out + [f"{op} of {short(dtype)} in an epilogue" for op, dtype in applied
                  if op != "cast" and not OPERATIONS[op].ptx(dtype)]


class Sources(Protocol):
    """Values that an epilogue reads. All take the numbers of the pair's row and columns."""

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]:
        """The sums of the elements."""

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        """Elements of a further parameter; one where it is the same for both."""

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]:
        """Indices, as s32; one where it is the same for both."""


@dataclass(frozen=True)
class EpilogueStep:
    """A node, the numbers of its arguments' steps, and what it depends on."""
    node: Expression
    args: tuple[int, ...]
    on_row: bool
    on_columns: bool


def steps(*roots: Expression) -> list[EpilogueStep]:
    """Expressions in the order of their evaluation; the last root comes last."""
    out: list[EpilogueStep] = []
    number: dict[Expression, int] = {}
    for node in dict.fromkeys(node for root in roots for node in walk(root)):
        args = tuple(number[arg] for arg in node.args) if isinstance(node, Apply) else ()
        row, columns = isinstance(node, Sum), isinstance(node, Sum)
        if isinstance(node, Load): row, columns = bool(node.m), bool(node.n)
        if isinstance(node, Position): row, columns = node.axis == "m", node.axis == "n"
        number[node] = len(out)
        out.append(EpilogueStep(node, args, row or any(out[i].on_row for i in args),
                        columns or any(out[i].on_columns for i in args)))
    return out


@dataclass
class EpilogueEmitter:
    """Evaluates `root` for pairs of elements; and what `before` has, which may share nodes with it."""
    kb: Kernel
    root: Expression
    sources: Sources
    width: int = 2
    before: tuple[Expression, ...] = ()
    known: dict[tuple[int, int, int], Lanes] = field(default_factory=dict)
    factors: dict[str, Value] = field(default_factory=dict)
    coarse: frozenset[Expression] = frozenset()

    def __post_init__(self) -> None:
        if found := problems(self.root, self.kb.arch):
            raise SpecError("; ".join(found), "dtypes that kernels of this architecture compute",
                            "leave the operation to tinygrad")
        self.steps = steps(*self.before, self.root)
        self.number = next(i for i, step in enumerate(self.steps) if step.node == self.root)
        self.coarse = coarse(self.steps)

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
                self.known[key] = self._emit_step(step, [values[i] for i in step.args], row, pair,
                                             last=number == len(self.steps) - 1)
            values.append(self.known[key])
        return values

    def _emit_step(self, step: EpilogueStep, args: list[Lanes], row: int, pair: int, last: bool) -> Lanes:
        kb, node = self.kb, step.node
        if isinstance(node, Sum): return Lanes(kb, node.dtype, list(self.sources.sums(node.part, row, pair)))
        if isinstance(node, Load): return self.sources.load(node, row, pair)
        if isinstance(node, Position):
            return Lanes(kb, node.dtype, list(self.sources.position(node.axis, row, pair)))
        if isinstance(node, Constant): return Lanes(kb, node.dtype, [constant(kb, node)])
        assert isinstance(node, Apply)
        if node.op == "cast":
            # bytes of a result are made when they are stored
            if last and node.dtype in FP8:
                return Lanes(kb, node.dtype, convert(args[0], dtypes.float32).each())
            return convert(args[0], node.dtype)
        if (number := of_constants(kb, node, args)) is not None: return number
        if (argument := identity_argument(node)) is not None: return args[argument]
        two = step.on_columns and self.width == 2
        if node in self.coarse:
            (by,) = args[1].wide
            assert isinstance(by, float)
            return Lanes(kb, node.dtype, each_lane(args[:1], lambda x: self._quotient(x, by)))
        if is_relu(node): return self._float(OPERATIONS["max"], node.dtype, args[1:], two)
        if dtypes.is_float(node.dtype) and node.op != "where":
            return self._float(OPERATIONS[node.op], node.dtype, args, two)
        return self._plain(node, args, two)

    # **** floats ****

    def _float(self, op: Operation, dtype: DType, args: list[Lanes], two: bool) -> Lanes:
        kb = self.kb
        if two and dtype in FLOAT16S and op.ptx_pair:
            return Lanes(kb, dtype, [], self._pair(op, FLOAT16S[dtype], [arg.pair() for arg in args]))
        if op.name == "reciprocal" and dtype == dtypes.float32:
            return Lanes(kb, dtype, each_lane(args, self._reciprocal))
        opcode = op.ptx_short if op.ptx_short and dtype != dtypes.float32 else op.ptx_f32
        wide = each_lane(args, lambda *operands: self._emit(opcode, "f32", *operands))
        return Lanes(kb, dtype, wide) if op.exact else round_floats(kb, wide, dtype)

    def _reciprocal(self, x: Number) -> Value:
        """1 / x to nearest: Newton's step, which is the fast path of rcp.rn, without a branch to its slow
        one. Where the step makes no sense (0, infinity, NaN) the approximation is exact."""
        close = self._emit(OPERATIONS["reciprocal"].ptx_f32, "f32", x)
        error = self._emit("fma.rn.f32", "f32", self._emit("neg.f32", "f32", x), close, 1.0)
        made = self._emit("fma.rn.f32", "f32", close, error, close)
        small = self._emit("setp.lt.f32", "pred", self._emit("abs.f32", "f32", error), 0.5)
        return self.kb.select(small, made, close)

    def _quotient(self, x: Number, by: float) -> Value:
        """x / by to nearest where that is normal. After one step it is one of the two nearest, and the second
        chooses (Markstein): the reciprocal is to nearest, remainders are exact. Where the product overflows,
        or x is infinite or NaN, it stands for the quotient."""
        factor = nearest(1 / by, dtypes.float32)
        product = made = self._emit("mul.f32", "f32", x, factor)
        for _ in range(2):
            rest = self._emit("fma.rn.f32", "f32", made, -by, x)
            made = self._emit("fma.rn.f32", "f32", rest, factor, made)
        size = self._emit("abs.f32", "f32", product)
        finite = self._emit("setp.le.f32", "pred", size, FLOATS[dtypes.float32][2])
        return self.kb.select(finite, made, product)

    def _pair(self, op: Operation, kind: str, args: list[Value]) -> Value:
        """An operation of two 16-bit floats at a time."""
        if op.ptx_fused is None or kind == "f16" or self.kb.arch >= "sm_90":
            return self._emit(op.ptx_pair.format(kind=kind), "b32", *args)
        order, factor = op.ptx_fused
        if op.name not in self.factors:
            self.factors[op.name] = self.kb.reg("b32", bits16(factor, dtypes.bfloat16) * 0x10001)
        named = {"a": args[0], "b": args[1], "f": self.factors[op.name]}
        return self._emit("fma.rn.bf16x2", "b32", *(named[operand] for operand in order))

    def _emit(self, opcode: str, kind: str, *operands: Number) -> Value:
        made = self.kb.reg(kind)
        self.kb.emit(opcode, made, *operands)
        return made

    # **** integers, booleans, comparisons, choices ****

    def _plain(self, node: Apply, args: list[Lanes], two: bool) -> Lanes:
        kb, op = self.kb, OPERATIONS[node.op]
        if op.name == "where": return self._emit_where(node.dtype, args, two)
        source = args[-1].dtype
        kind = kind_of(source)
        opcode = op.ptx(source).format(kind=kind)
        if kind == "pred" and op.name == "less":  # false before true
            return Lanes(kb, node.dtype, each_lane(
                args, lambda a, b: self._emit(opcode, kind, _not(a), b)))
        made = each_lane(args, lambda *operands: self._emit(
            opcode, "pred" if op.compares else kind, *operands))
        kept = op.compares or op.fits_dtype or kind == "pred"
        return Lanes(kb, node.dtype, made if kept else [wrap(kb, each, node.dtype) for each in made])

    def _emit_where(self, dtype: DType, args: list[Lanes], two: bool) -> Lanes:
        kb, kind = self.kb, kind_of(dtype)
        if kind == "pred":
            return Lanes(kb, dtype, each_lane(args, lambda p, a, b: self._emit(
                "or.pred", "pred", self._emit("and.pred", "pred", p, a),
                self._emit("and.pred", "pred", _not(p), b))))
        if two and dtype in FLOAT16S and len(args[0].each()) == 1:
            return Lanes(kb, dtype, [], kb.select(args[0].register(), args[1].pair(), args[2].pair(), "b32"))
        opcode = OPERATIONS["where"].ptx(dtype).format(kind=kind)
        return Lanes(kb, dtype, each_lane(args, lambda p, a, b: self._emit(opcode, kind, a, b, p)))


def _not(predicate: Number) -> Value:
    assert isinstance(predicate, Value)
    return ~predicate


def each_lane(args: Sequence[Lanes], make: Callable[..., Value]) -> list[Number]:
    """An operation for each element; once where no argument differs between them."""
    count = max(len(arg.each()) for arg in args)
    return [make(*(arg.at(i) for arg in args)) for i in range(count)]


def coarse(found: Sequence[EpilogueStep]) -> frozenset[Expression]:
    """Quotients by a constant that only `round` and casts to 8-bit floats take, which see neither a last bit
    of small ones nor how large the largest are."""
    users: dict[Expression, list[Apply]] = {}
    for node in (step.node for step in found if isinstance(step.node, Apply)):
        for arg in node.args: users.setdefault(arg, []).append(node)
    return frozenset(node for node, those in users.items() if isinstance(node, Apply) and node.op == "div"
                     and isinstance(node.args[1], Constant) and 2.0 ** -60 < node.args[1].value < 2.0 ** 60
                     and all(user.op == "round" or user.dtype in FP8 for user in those))


def is_relu(node: Apply) -> bool:
    """Whether a node is `0 < x ? x : 0`, which is max(x, 0) also where x is NaN or -0."""
    if node.op != "where" or not dtypes.is_float(node.dtype): return False
    test, x, otherwise = node.args
    nothing = Constant(0.0, node.dtype)
    return otherwise == nothing and test == Apply("less", (nothing, x), dtypes.bool)


def of_constants(kb: Kernel, node: Apply, args: Sequence[Lanes]) -> Lanes | None:
    """Returns the result of constants alone, where they are floats and the operation is arithmetic."""
    numbers = [float(arg.wide[0]) for arg in args if arg.wide and not isinstance(arg.wide[0], Value)]
    if not (OPERATIONS[node.op].arithmetic and len(numbers) == len(args) and dtypes.is_float(node.dtype)):
        return None
    number = fold(node.op, *numbers)
    return None if number is None else Lanes(kb, node.dtype, [nearest(number, node.dtype)])


def identity_argument(node: Apply) -> int | None:
    """The number of the argument that a node's value is, by the identities with which tinygrad simplifies its
    own kernels: x + 0, x · 1, and x · 0 for finite x."""
    if node.op not in ("add", "mul") or not dtypes.is_float(node.dtype): return None
    for i, arg in enumerate(node.args):
        value = arg.value if isinstance(arg, Constant) else None
        if (node.op, value) == ("mul", 0): return i
        if (node.op, value) in (("add", 0), ("mul", 1)): return 1 - i
    return None


def constant(kb: Kernel, node: Constant) -> Number:
    """A constant as an operand: a predicate must be in a register."""
    if node.dtype == dtypes.bool: return kb.reg("pred", int(node.value))
    if dtypes.is_float(node.dtype): return nearest(float(node.value), node.dtype)
    return wrap(kb, int(node.value), node.dtype)


# **** one element ****

@dataclass
class _Single:
    """The sources of one element, from functions."""
    kb: Kernel
    values: Sequence[Value]
    loader: Callable[[Load], Value]
    index: Callable[[str | int], Value]

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: return [self.values[part]]

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        return Lanes(self.kb, load.dtype, [self.loader(load)])

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]: return [self.index(axis)]


def evaluate_element(kb: Kernel, root: Expression, sums: Sequence[Value], load: Callable[[Load], Value],
             position: Callable[[str | int], Value]) -> Value:
    """The value of `root` for one element: f32 for floats (rounded to its dtype, but for 8-bit floats),
    s32 or u32 for integers, a predicate for booleans. `load` gives a load's element in the same form,
    `position` an index as s32."""
    return EpilogueEmitter(kb, root, _Single(kb, sums, load, position), width=1).at(0, 0).register()


def load_element(kb: Kernel, pointer: Value, index: Value, dtype: DType) -> Value:
    """Element `index` (u64) of `dtype` in the form `evaluate_element` wants."""
    return read(kb, pointer + index * dtype.itemsize, 0, dtype, 1).register()


def store_element(kb: Kernel, address: Value, value: Value, dtype: DType) -> None:
    """Stores a value of `evaluate_element` as one element of `dtype`."""
    write(kb, address, 0, Lanes(kb, dtype, [value]), 1)
