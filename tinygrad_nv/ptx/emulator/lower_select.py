"""Comparisons and selections to ops of compare.c and move.c: setp, set, testp, selp, slct.

Protocol: an op of compare.c has a comparison of `COMPARISONS` in `more`; those that are not there swap their
operands.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_operate import dest, kind_of, only, operate, pair, source
from tinygrad_nv.ptx.emulator.lowering import WIDTHS, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Instruction, Operand

COMPARISONS = ("eq", "ne", "lt", "le", "equ", "neu", "ltu", "leu", "num", "nan")  # compare.c: enum { EQ, … }
SWAPPED = {"gt": "lt", "ge": "le", "gtu": "ltu", "geu": "leu", "hi": "lt", "hs": "le"}
UNSIGNED = {"lo": "lt", "ls": "le"}
WORDS = (*COMPARISONS, *SWAPPED, *UNSIGNED)
BOOLEANS = {"and": 1, "or": 2, "xor": 3}
FLUSH = 4  # compare.c: FLUSH_COMPARE
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64", "b16", "b32", "b64")
FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
# testp: bits 1 infinite, 2 NaN, 4 normal, 8 subnormal, 16 zero
CLASSES = {"finite": 28, "infinite": 1, "number": 29, "notanumber": 2, "normal": 20, "subnormal": 8}
# set: what is true
TRUE = {"u32": 0xffffffff, "s32": 0xffffffff, "u16": 0xffff, "s16": 0xffff, "f32": 0x3f800000, "f16": 0x3c00,
        "bf16": 0x3f80, "f16x2": 0x3c003c00, "bf16x2": 0x3f803f80}


def compare(low: FunctionLowering, kind: str, d: int, e: int, operands: tuple[Operand, ...]) -> None:
    """Emits the comparison of the current instruction: `operands` are a, b and perhaps c."""
    word = low.one_of(*WORDS)
    if not word: raise low.fail("the comparison is missing", ", ".join(f".{name}" for name in WORDS))
    a, b = source(low, operands[0], kind), source(low, operands[1], kind)
    if word in SWAPPED: a, b = b, a
    number = COMPARISONS.index(SWAPPED.get(word, UNSIGNED.get(word, word)))
    if kind in INTEGERS and number > 3: raise low.fail(f".{word} of integers")
    how = low.one_of(*BOOLEANS)
    if bool(how) != (len(operands) == 3): raise low.fail("a Boolean operation needs a third operand")
    c = source(low, operands[2], "pred") if how else -1
    reads = (a, b, c) if how else (a, b)
    name = f"setp_{kind.replace('b', 'u') if kind in INTEGERS else kind}"
    low.emit(name, d=d, a=a, b=b, c=c, e=e, more=number,
             flags=BOOLEANS.get(how, 0) | (FLUSH if low.has("ftz") else 0), reads=reads,
             writes=tuple(place for place in (d, e) if place >= 0))


@lowers("setp")
def set_predicate(low: FunctionLowering, instruction: Instruction) -> None:
    """`setp.cmp{.op}{.ftz}.type p{|q}, a, b{, {!}c}`."""
    only(low, *WORDS, *BOOLEANS, "ftz")
    kind = kind_of(low, *INTEGERS, *FLOATS)
    d, e = pair(low, instruction.operands[0], "pred", "pred")
    compare(low, kind, d, e, instruction.operands[1:])


@lowers("set")
def set_value(low: FunctionLowering, instruction: Instruction) -> None:
    """`set.cmp{.op}{.ftz}.dtype.stype d, a, b{, {!}c}`: all ones or 1.0 where it holds, 0 elsewhere; for
    packed halves, in each half."""
    only(low, *WORDS, *BOOLEANS, "ftz")
    to, kind = kind_of(low, *TRUE), kind_of(low, *INTEGERS, *FLOATS, at=1)
    d, p = dest(low, instruction.operands[0], to), low.scratch("pred")
    if not kind.endswith("x2"):
        compare(low, kind, p, -1, instruction.operands[1:])
        low.emit("selp_b32", d=d, a=low.constant(TRUE[to], 4), b=low.constant(0, 4), c=p)
        return
    q = low.scratch("pred")
    compare(low, kind, p, q, instruction.operands[1:])
    low.emit("select_pair", d=d, a=p, b=q, imm=TRUE[to])


@lowers("testp")
def test_property(low: FunctionLowering, instruction: Instruction) -> None:
    """`testp.class.type p, a`; zero is a normal number here."""
    only(low, *CLASSES)
    kind = kind_of(low, "f32", "f64")
    operate(low, f"testp_{kind}", ("pred", kind), flags=CLASSES[low.one_of(*CLASSES)])


@lowers("selp")
def select(low: FunctionLowering, instruction: Instruction) -> None:
    """`selp.type d, a, b, c`: a where the predicate c holds."""
    only(low)
    kind = kind_of(low, *INTEGERS, "f32", "f64")
    operate(low, "selp_b64" if WIDTHS[kind] == 8 else "selp_b32", (kind, kind, kind, "pred"))


@lowers("slct")
def select_by_sign(low: FunctionLowering, instruction: Instruction) -> None:
    """`slct{.ftz}.dtype.{s32,f32} d, a, b, c`: a where c >= 0."""
    only(low, "ftz")
    kind, by = kind_of(low, *INTEGERS, "f32", "f64"), kind_of(low, "s32", "f32", at=1)
    operate(low, f"slct_{'b64' if WIDTHS[kind] == 8 else 'b32'}_{by}", (kind, kind, kind, by),
            flags=int(low.has("ftz")))
