"""Element operations in instructions, one or two elements at a time.

Protocol: `applied(kb, fn, parts)` is a row of operations.LANGUAGE_OPERATIONS over `Lanes`. Floats are
computed in float32 and rounded to their dtype; pairs of 16 bits by instructions that round once, which gives
the same bits. Numbers that are known stay numbers. Divisions of float32 are rounded to nearest; where the
result is rounded to 16 bits or fewer, two units of float32 do. `exp2_small` is 0 below 2^-126.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.epilogue import each_lane
from tinygrad_nv.tile.expression import nearest
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes, Number, bits16, convert, kind_of, round_floats, wrap
from tinygrad_nv.tile.operations import LANGUAGE_OPERATIONS, LN2, Operation

SMALL, LARGE = 2.0 ** -96, 2.0 ** 96     # sizes of divisors beyond which they are scaled
# 2 pi in three parts of few bits, so that whole multiples of the first two are exact (Cody and Waite 1980)
TURN = (6.28125, 0.0019350051879882812, 3.0199159819567055e-07)


def constant(kb: Kernel, value: float | int | bool, dtype: DType) -> Lanes:
    """A number that is known."""
    if dtype == dtypes.bool: return Lanes(kb, dtype, [int(bool(value))])
    if dtypes.is_float(dtype): return Lanes(kb, dtype, [nearest(float(value), dtype)])
    return Lanes(kb, dtype, [wrap(kb, int(value), dtype)])


def constant_number(part: Lanes) -> float | None:
    """The number that all elements of a part are; None where only the kernel knows."""
    if part.packed is not None or len(part.wide) != 1 or isinstance(part.wide[0], Value): return None
    return part.wide[0]


def cast(part: Lanes, dtype: DType) -> Lanes:
    """Converted as `tile.cast` says."""
    number = constant_number(part)
    if number is not None and (dtypes.is_float(dtype) or dtype == dtypes.bool
                               or not dtypes.is_float(part.dtype)):
        return constant(part.kb, number, dtype)
    if part.dtype == dtypes.bool and number is not None: part = Lanes(part.kb, part.dtype, [part.register()])
    return convert(part, dtype)


def bitcast(part: Lanes, dtype: DType) -> Lanes:
    """The same 32 bits."""
    kb = part.kb

    def move(x: Number) -> Value:
        made = kb.reg(kind_of(dtype))
        kb.emit("mov.b32", made, x if isinstance(x, Value) else kb.reg(kind_of(part.dtype), x))
        return made
    return Lanes(kb, dtype, each_lane([part], move))


def apply_row(kb: Kernel, fn: str, given: Sequence[Lanes]) -> Lanes:
    """The value of a row of the table."""
    row, source = LANGUAGE_OPERATIONS[fn], given[-1].dtype
    numbers = [constant_number(each) for each in given]
    if fn == "where": return _select(kb, given, numbers[0])
    alone = all(number is not None for number in numbers)
    if alone and (made := _fold_numbers(kb, row, source, numbers)) is not None: return made
    if source == dtypes.bool: return _boolean(kb, row, given, numbers)
    if not dtypes.is_float(source): return _integer(kb, row, given)
    if row.compares:
        return Lanes(kb, dtypes.bool, each_lane(given, lambda *x: _emit(kb, row.ptx_f32, "pred", *x)))
    return _float(kb, row, source, given)


def _fold_numbers(kb: Kernel, row: Operation, dtype: DType, numbers: Sequence[Number | None]) -> Lanes | None:
    if row.value is None: return None
    try: return constant(kb, row.value(*numbers), dtypes.bool if row.compares else dtype)
    except (ArithmeticError, ValueError): return None


def _emit(kb: Kernel, opcode: str, kind: str, *operands: Number) -> Value:
    made = kb.reg(kind)
    kb.emit(opcode, made, *operands)
    return made


# **** floats ****

def _float(kb: Kernel, row: Operation, dtype: DType, given: Sequence[Lanes]) -> Lanes:
    two = any(part.several for part in given)
    if two and dtype in FLOAT16S and row.ptx_pair:
        return Lanes(kb, dtype, [], _pair(kb, row, FLOAT16S[dtype], given))
    if row.name == "sin": wide = each_lane(given, lambda x: _sine(kb, x))
    elif row.name == "log_normal":
        wide = each_lane(given, lambda x: _emit(kb, "mul.f32", "f32", _emit(kb, row.ptx_f32, "f32", x), LN2))
    elif row.name == "log_near_one": wide = each_lane(given, lambda x: _log_near_one(kb, x))
    elif row.name == "div": wide = _divide(kb, dtype, given)
    else:
        opcode = row.ptx_short if row.ptx_short and dtype != dtypes.float32 else row.ptx_f32
        if row.name == "exp2_small": opcode = "ex2.approx.ftz.f32"
        wide = each_lane(given, lambda *x: _emit(kb, opcode, "f32", *x))
    return Lanes(kb, dtype, wide) if row.exact else round_floats(kb, wide, dtype)


def _pair(kb: Kernel, row: Operation, kind: str, given: Sequence[Lanes]) -> Value:
    """Two 16-bit floats at a time; before sm_90 bf16 has fma alone."""
    pairs = [part.pair() for part in given]
    if row.ptx_fused is None or kind == "f16" or kb.arch >= "sm_90":
        return _emit(kb, row.ptx_pair.format(kind=kind), "b32", *pairs)
    order, factor = row.ptx_fused
    named = dict(zip("ab", pairs, strict=False))
    if "f" in order: named["f"] = kb.reg("b32", bits16(factor, dtypes.bfloat16) * 0x10001)
    return _emit(kb, "fma.rn.bf16x2", "b32", *(named[operand] for operand in order))


def _divide(kb: Kernel, dtype: DType, given: Sequence[Lanes]) -> list[Number]:
    if dtype != dtypes.float32:
        return each_lane(given, lambda a, b: _emit(kb, "div.full.f32", "f32", a, b))
    if constant_number(given[0]) == 1.0: return each_lane(given[1:],
                                                          lambda b: _emit(kb, "rcp.rn.f32", "f32", b))
    return each_lane(given, lambda a, b: _emit(kb, "div.rn.f32", "f32", a, b))


class Divider:
    """Quotients of float32 by divisors that many elements have: a reciprocal each, and for each element a
    product that is corrected once, which is rounded to nearest (Markstein 1990) where it is normal. Divisors
    are scaled by a power of two where their reciprocals would be infinite or subnormal."""

    def __init__(self, kb: Kernel) -> None:
        self.kb = kb
        self.known: dict[Number, tuple[Value, Value, Value]] = {}

    def __call__(self, x: Lanes, by: Lanes) -> Lanes:
        return Lanes(self.kb, x.dtype, each_lane([x, by], self._quotient))

    def _reciprocal(self, by: Number) -> tuple[Value, Value, Value]:
        """The divisor, scaled; its reciprocal; the scale."""
        kb = self.kb
        size = _emit(kb, "abs.f32", "f32", by)
        scale = kb.select(size < SMALL, 1 / SMALL, 1.0, "f32")
        scale = kb.select(size > LARGE, 1 / LARGE, scale, "f32")
        scaled = _emit(kb, "mul.f32", "f32", by, scale)
        close = _emit(kb, "rcp.approx.f32", "f32", scaled)
        error = _emit(kb, "fma.rn.f32", "f32", -scaled, close, 1.0)
        better = _emit(kb, "fma.rn.f32", "f32", close, error, close)
        return scaled, kb.select(_emit(kb, "abs.f32", "f32", error) < 0.5, better, close, "f32"), scale

    def _quotient(self, x: Number, by: Number) -> Value:
        kb = self.kb
        if by not in self.known: self.known[by] = self._reciprocal(by)
        divisor, factor, scale = self.known[by]
        product = _emit(kb, "mul.f32", "f32", x, factor)
        rest = _emit(kb, "fma.rn.f32", "f32", -divisor, product, x)
        made = _emit(kb, "fma.rn.f32", "f32", rest, factor, product)
        finite = _emit(kb, "abs.f32", "f32", made) < math.inf    # of infinities and NaN the rest is NaN
        return _emit(kb, "mul.f32", "f32", kb.select(finite, made, product, "f32"), scale)


def _sine(kb: Kernel, x: Number) -> Value:
    """The hardware's sine is good within ±pi: after the nearest multiple of 2 pi is taken away."""
    turns = _emit(kb, "cvt.rni.f32.f32", "f32", _emit(kb, "mul.f32", "f32", x, 1 / (2 * math.pi)))
    rest = x
    for each in TURN: rest = _emit(kb, "fma.rn.f32", "f32", turns, -each, rest)
    return _emit(kb, "sin.approx.f32", "f32", rest)


def _log_near_one(kb: Kernel, x: Number) -> Value:
    """By the series of the logarithm of (1 + s) / (1 - s), plus a whole number times log 2: m lies in [3/4,
    3/2), so |s| < 1/5 and m - 1 is exact."""
    bits = _emit(kb, "mov.b32", "s32", x)
    exponent = _emit(kb, "sub.s32", "s32", bits, 0x3F400000) >> 23      # the bits of 3/4
    m = _emit(kb, "mov.b32", "f32", _emit(kb, "sub.s32", "s32", bits, exponent << 23))
    s = _emit(kb, "div.full.f32", "f32", m - 1.0, m + 1.0)
    t, y = _emit(kb, "mul.f32", "f32", s, s), kb.reg("f32", 2 / 9)
    for power in (7, 5, 3, 1): y = _emit(kb, "fma.rn.f32", "f32", y, t, 2 / power)
    whole = exponent.to("f32")
    return _emit(kb, "fma.rn.f32", "f32", whole, LN2, _emit(kb, "mul.f32", "f32", y, s))


# **** integers and booleans ****

def _integer(kb: Kernel, row: Operation, given: Sequence[Lanes]) -> Lanes:
    dtype = given[-1].dtype
    kind = kind_of(dtype)
    opcode = row.ptx_integer.format(kind=kind)
    if row.name == "abs" and dtypes.is_unsigned(dtype): return given[0]
    if row.name in ("quotient", "remainder"):
        make = lambda a, b: _quotient(kb, row.name, kind, a, b)  # noqa: E731
    else: make = lambda *x: _emit(kb, opcode, "pred" if row.compares else kind, *x)  # noqa: E731
    made = each_lane(given, make)
    if row.compares: return Lanes(kb, dtypes.bool, made)
    return Lanes(kb, dtype,
                 made if row.fits_dtype and row.name != "shift_left" else [wrap(kb, x, dtype) for x in made])


def _quotient(kb: Kernel, name: str, kind: str, a: Number, b: Number) -> Value:
    """By 0 it is 0, and nothing remains."""
    x = a if isinstance(a, Value) else kb.reg(kind, a)
    if isinstance(b, int) and b: return x // b if name == "quotient" else x % b
    by = b if isinstance(b, Value) else kb.reg(kind, b)
    quotient = kb.select(by == 0, 0, x // by, kind)
    return quotient if name == "quotient" else kb.select(by == 0, 0, x - quotient * by, kind)


def _boolean(kb: Kernel, row: Operation, given: Sequence[Lanes], numbers: Sequence[Number | None]) -> Lanes:
    if row.name in ("xor", "not_equal") and 1 in numbers:   # not x
        other = given[1 - numbers.index(1)]
        return Lanes(kb, dtypes.bool, each_lane([other], lambda p: _emit(kb, "not.pred", "pred", p)))
    parts = [Lanes(kb, dtypes.bool, [kb.reg("pred", number)]) if number is not None else part
             for part, number in zip(given, numbers, strict=True)]
    if row.name == "less":   # false before true
        return Lanes(kb, dtypes.bool, each_lane(
            parts, lambda a, b: _emit(kb, row.ptx_bool, "pred", _emit(kb, "not.pred", "pred", a), b)))
    return Lanes(kb, dtypes.bool, each_lane(parts, lambda *x: _emit(kb, row.ptx_bool, "pred", *x)))


def _select(kb: Kernel, given: Sequence[Lanes], number: Number | None) -> Lanes:
    test, a, b = given
    if number is not None: return a if number else b
    dtype, kind = a.dtype, kind_of(a.dtype)
    if kind == "pred":
        a, b = (Lanes(kb, dtype, [kb.reg("pred", n)]) if (n := constant_number(part)) is not None else part
                for part in (a, b))
        return Lanes(kb, dtype, each_lane([test, a, b], lambda p, x, y: _emit(
            kb, "or.pred", "pred", _emit(kb, "and.pred", "pred", p, x),
            _emit(kb, "and.pred", "pred", _emit(kb, "not.pred", "pred", p), y))))
    packed = any(part.packed is not None for part in (a, b))
    if packed and dtype in FLOAT16S and len(test.each()) == 1:
        return Lanes(kb, dtype, [], kb.select(test.register(), a.pair(), b.pair(), "b32"))
    return Lanes(kb, dtype,
                 each_lane([test, a, b], lambda p, x, y: _emit(kb, f"selp.{_type(kind)}", kind, x, y, p)))


def _type(kind: str) -> str: return kind if kind == "f32" else "b32"
