"""The element operations of expressions, one row each: what they compute and how each target writes it.

Protocol: `OPERATIONS` has a row for each name of `Apply`. A new operation is one row here. Its graph cell
lets the patterns translate it, its cells for a target let that target compute it, and the tests of this table
(tests/emu/tile/test_operation_table.py) compare the new row's PTX, C, value and slope with each other.

An empty cell says that a target does not compute the operation for such arguments; `problems` of the target
says so. Cells of PTX are opcodes; `{kind}` is s32 or u32, of pairs f16 or bf16. Cells of C are text over
vectors; {0}, {1}, … are the arguments.

Three things are code of the targets, since a cell cannot say them: conversions ("cast"), the choice of
predicates, and the Newton step that follows the approximate reciprocal in float32 (both epilogue.py).

A slope is the derivative of the result: a function of the result, the arguments and the slopes of the
arguments, all float32 expressions. `plus`, `minus`, `times` and `either` of an expression leave out what
changes nothing. Operations whose results are booleans or integers have no slope.

`LANGUAGE_OPERATIONS` has a row for each [fn] of an `apply` of the tile language (language/ir.py): these, and
some more that only programs of users need.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad.dtype import DType, dtypes

Number = float | int | bool
LN2 = math.log(2)
# unsigned integers in signed registers: with the upper bit flipped their order is that of signed ones
_ORDER = "({{0}} ^ (s32)0x80000000) {} ({{1}} ^ (s32)0x80000000)"


@dataclass(frozen=True)
class Operation:
    """A row of the table. `value` takes Python numbers and raises ArithmeticError or ValueError where there
    is no result, as of 1 / 0; `fold` catches these."""
    name: str
    arity: int
    value: Callable[..., Number] | None = None
    slope: Callable[..., Any] | None = None
    graph: str = ""             # the member of tinygrad's Ops
    sign: str = ""              # infix, in the text for a reader
    compares: bool = False      # the result is a boolean, whatever the arguments are
    exact: bool = False         # the result is one of the arguments and needs no rounding
    arithmetic: bool = False    # PTX has the result where the arguments are constants
    cost: int = 1               # issue slots on a GPU; a transcendental takes a quarter of the lanes, twice
    series: bool = False        # a polynomial on a CPU: worth keeping rather than computing again
    ptx_f32: str = ""
    ptx_short: str = ""         # replaces ptx_f32 where the result is rounded to 16 bits or fewer
    ptx_pair: str = ""          # two 16-bit floats at once
    # replaces ptx_pair for bf16 before sm_90: the order of the operands of fma.rn.bf16x2, and the number f
    ptx_fused: tuple[str, float] | None = None
    ptx_integer: str = ""
    ptx_bool: str = ""          # for "less" the first argument is negated
    c_float: str = ""
    c_integer: str = ""
    c_unsigned: str = ""        # replaces c_integer for uint32
    c_bool: str = ""

    @property
    def fits_dtype(self) -> bool:
        """Whether the result of 8- or 16-bit integers, in PTX, fits their dtype without being wrapped."""
        return self.exact or self.ptx_integer.endswith(".b32")

    @property
    def on_cpu(self) -> bool:
        """Whether there is C for arguments of some dtype."""
        return any((self.c_float, self.c_integer, self.c_bool))

    def ptx(self, dtype: DType) -> str:
        """The opcode for arguments of `dtype`, one element at a time; "" where there is none."""
        if dtype == dtypes.bool: return self.ptx_bool
        return self.ptx_f32 if dtypes.is_float(dtype) else self.ptx_integer

    def c(self, dtype: DType) -> str:
        """The C for arguments of `dtype`; "" where there is none."""
        if dtype == dtypes.bool: return self.c_bool
        if dtypes.is_float(dtype): return self.c_float
        return self.c_unsigned if dtype == dtypes.uint32 and self.c_unsigned else self.c_integer


def _unless_nan(choose: Callable[..., Number]) -> Callable[[Number, Number], Number]:
    """max or min that prefers a number to NaN."""
    return lambda x, y: y if x != x else x if y != y else choose(x, y)


_ROWS = (
    Operation("add", 2, operator.add, lambda y, a, b, da, db: da.plus(db),
              graph="ADD", sign="+", arithmetic=True,
              ptx_f32="add.f32", ptx_pair="add.rn.{kind}x2", ptx_fused=("afb", 1.0),
              ptx_integer="add.{kind}", ptx_bool="or.pred",
              c_float="{0} + {1}", c_integer="{0} + {1}", c_bool="{0} | {1}"),
    Operation("sub", 2, operator.sub, lambda y, a, b, da, db: da.minus(db),
              graph="SUB", sign="-", arithmetic=True,
              ptx_f32="sub.f32", ptx_pair="sub.rn.{kind}x2", ptx_fused=("bfa", -1.0),
              ptx_integer="sub.{kind}",
              c_float="{0} - {1}", c_integer="{0} - {1}"),
    Operation("mul", 2, operator.mul, lambda y, a, b, da, db: da.times(b).plus(a.times(db)),
              graph="MUL", sign="*", arithmetic=True,
              ptx_f32="mul.f32", ptx_pair="mul.rn.{kind}x2", ptx_fused=("abf", -0.0),
              ptx_integer="mul.lo.{kind}", ptx_bool="and.pred",
              c_float="{0} * {1}", c_integer="{0} * {1}", c_bool="{0} & {1}"),

    # PTX prefers a number to NaN, C keeps a NaN that comes first: both as tinygrad's own kernels. The slope
    # is that of the chosen argument, of equal ones the first
    Operation("max", 2, _unless_nan(max), lambda y, a, b, da, db: (a < b).either(db, da),
              graph="MAX", exact=True,
              ptx_f32="max.f32", ptx_pair="max.{kind}x2", ptx_integer="max.{kind}", ptx_bool="or.pred",
              c_float="pick({0} < {1}, {1}, {0})", c_integer="pick_i({0} > {1}, {0}, {1})",
              c_unsigned=f"pick_i({_ORDER.format('>')}, {{0}}, {{1}})", c_bool="{0} | {1}"),
    Operation("min", 2, _unless_nan(min), lambda y, a, b, da, db: (b < a).either(db, da),
              exact=True,
              ptx_f32="min.f32", ptx_pair="min.{kind}x2", ptx_integer="min.{kind}", ptx_bool="and.pred",
              c_float="pick({1} < {0}, {1}, {0})", c_integer="pick_i({0} < {1}, {0}, {1})",
              c_unsigned=f"pick_i({_ORDER.format('<')}, {{0}}, {{1}})", c_bool="{0} & {1}"),

    Operation("reciprocal", 1, lambda x: 1 / x, lambda y, x, dx: (y * y * -1.0).times(dx),
              graph="RECIPROCAL", arithmetic=True, cost=8, ptx_f32="rcp.approx.f32", c_float="1.f / {0}"),
    # rounded to nearest, which tinygrad's own kernels, with x · (1 / y), are not
    Operation("div", 2, operator.truediv,
              lambda y, a, b, da, db: da.minus(y.times(db)).times(b.reciprocal()),
              sign="/", arithmetic=True, cost=10, ptx_f32="div.rn.f32", c_float="{0} / {1}"),
    # ties to even
    Operation("round", 1, lambda x: math.copysign(round(x), x), lambda y, x, dx: dx * 0.0,
              cost=2, ptx_f32="cvt.rni.f32.f32", c_float="round_({0})"),
    Operation("exp2", 1, lambda x: 2.0**x, lambda y, x, dx: (y * LN2).times(dx),
              graph="EXP2", cost=8, series=True, ptx_f32="ex2.approx.f32", c_float="exp2_({0})"),
    Operation("log2", 1, math.log2, lambda y, x, dx: (x.reciprocal() * (1 / LN2)).times(dx),
              graph="LOG2", cost=8, series=True, ptx_f32="lg2.approx.f32", c_float="log2_({0})"),
    # the error of the approximation, a unit of float32, is far below a rounding to 16 bits
    Operation("sqrt", 1, math.sqrt, lambda y, x, dx: (y.reciprocal() * 0.5).times(dx),
              graph="SQRT", cost=8, ptx_f32="sqrt.rn.f32", ptx_short="sqrt.approx.f32", c_float="sqrt_({0})"),
    # no C: the reduction of large arguments is not worth a copy of a mathematical library
    Operation("sin", 1, math.sin, lambda y, x, dx: (x + math.pi / 2).sin().times(dx),
              graph="SIN", cost=8, ptx_f32="sin.approx.f32"),

    # NaN is less than nothing, and not equal to anything, itself included
    Operation("less", 2, operator.lt,
              graph="CMPLT", sign="<", compares=True,
              ptx_f32="setp.lt.f32", ptx_integer="setp.lt.{kind}", ptx_bool="and.pred",
              c_float="{0} < {1}", c_integer="{0} < {1}", c_unsigned=_ORDER.format("<"), c_bool="~{0} & {1}"),
    Operation("not_equal", 2, operator.ne,
              graph="CMPNE", sign="!=", compares=True,
              ptx_f32="setp.neu.f32", ptx_integer="setp.ne.{kind}", ptx_bool="xor.pred",
              c_float="{0} != {1}", c_integer="{0} != {1}", c_bool="{0} ^ {1}"),

    Operation("and", 2, operator.and_, graph="AND", ptx_integer="and.b32", ptx_bool="and.pred",
              c_integer="{0} & {1}", c_bool="{0} & {1}"),
    Operation("or", 2, operator.or_, graph="OR", ptx_integer="or.b32", ptx_bool="or.pred",
              c_integer="{0} | {1}", c_bool="{0} | {1}"),
    Operation("xor", 2, operator.xor, graph="XOR", ptx_integer="xor.b32", ptx_bool="xor.pred",
              c_integer="{0} ^ {1}", c_bool="{0} ^ {1}"),

    # the condition comes first
    Operation("where", 3, lambda c, x, y: x if c else y, lambda y, c, a, b, dc, da, db: c.either(da, db),
              graph="WHERE", exact=True,
              ptx_f32="selp.f32", ptx_integer="selp.{kind}", ptx_bool="or.pred",
              c_float="pick({0}, {1}, {2})", c_integer="pick_i({0}, {1}, {2})",
              c_bool="pick_i({0}, {1}, {2})"),
    Operation("cast", 1, slope=lambda y, x, dx: dx, graph="CAST"),
)
OPERATIONS = {each.name: each for each in _ROWS}


def fold(name: str, *numbers: Number) -> Number | None:
    """Returns the result of an operation on Python numbers; None where there is none, as of 1 / 0."""
    if (value := OPERATIONS[name].value) is None: return None
    try: return value(*numbers)
    except (ArithmeticError, ValueError): return None


def _truncate(a: int, b: int) -> int: return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_LANGUAGE_ONLY = (
    # integers, towards zero; anything divided by 0 is 0, with no remainder
    Operation("quotient", 2, lambda a, b: _truncate(int(a), int(b)), cost=20, ptx_integer="div.{kind}",
              c_integer="quotient_i({0}, {1})", c_unsigned="(vi)quotient_u((vu){0}, (vu){1})"),
    Operation("remainder", 2, lambda a, b: int(a) - int(b) * _truncate(int(a), int(b)), cost=24,
              ptx_integer="rem.{kind}", c_integer="remainder_i({0}, {1})",
              c_unsigned="(vi)remainder_u((vu){0}, (vu){1})"),
    # by 32 and more gives 0, or the sign
    Operation("shift_left", 2, lambda a, b: int(a) << int(b), ptx_integer="shl.b32",
              c_integer="shift_left_i({0}, {1})"),
    Operation("shift_right", 2, lambda a, b: int(a) >> int(b), ptx_integer="shr.{kind}",
              c_integer="shift_right_i({0}, {1})", c_unsigned="(vi)shift_right_u((vu){0}, (vu){1})"),
    Operation("mul_high", 2, lambda a, b: int(a) * int(b) >> 32, cost=4, ptx_integer="mul.hi.{kind}",
              c_integer="mul_high_i({0}, {1})", c_unsigned="(vi)mul_high_u((vu){0}, (vu){1})"),
    # the upper word of two, of which the lower comes first, shifted left by the lowest five bits of the third
    Operation("funnel_left", 3, ptx_integer="shf.l.wrap.b32",
              c_integer="(vi)funnel_left_u((vu){0}, (vu){1}, (vu){2})"),
    # natural logarithms of positive normal numbers. On GPUs the first is the hardware's, whose error is large
    # beside a result near 0, the second a series
    Operation("log_normal", 1, math.log, cost=10, series=True, ptx_f32="lg2.approx.f32",
              c_float="log_normal({0})"),
    Operation("log_near_one", 1, math.log, cost=24, series=True, ptx_f32="fma.rn.f32",
              c_float="log_normal({0})"),
    # rounded once, where there is an instruction
    Operation("fma", 3, ptx_f32="fma.rn.f32", c_float="fma_({0}, {1}, {2})"),
    # of numbers that are at most about 1, as in a softmax: results below 2^-126 are 0
    Operation("exp2_small", 1, lambda x: 2.0**x, cost=8, series=True, ptx_f32="ex2.approx.f32",
              c_float="exp2_small({0})"),
    Operation("floor", 1, lambda x: math.floor(x), cost=2, ptx_f32="cvt.rmi.f32.f32",
              c_float="__builtin_elementwise_floor({0})"),
    Operation("abs", 1, abs, exact=True, ptx_f32="abs.f32", ptx_integer="abs.{kind}",
              c_float="__builtin_elementwise_abs({0})", c_integer="__builtin_elementwise_abs({0})",
              c_unsigned="{0}"),
    # PTX: after a reduction of the argument by multiples of 2 pi
    Operation("sin", 1, math.sin, cost=16, ptx_f32="sin.approx.f32", c_float="sin_({0})"),
)
LANGUAGE_OPERATIONS = OPERATIONS | {each.name: each for each in _LANGUAGE_ONLY}
