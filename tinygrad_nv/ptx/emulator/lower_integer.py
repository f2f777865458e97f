"""Integer arithmetic, logic, shifts and bit fields to ops of integer.c and bits.c.

Protocol: `arithmetic` lowers the integer forms of mnemonics that floats have too (add, sub, mul, mad, div,
min, max, abs, neg); lower_float.py registers those and asks here when the type is an integer's. The condition
code of .cc is a predicate of its own.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_operate import (
    bits_kind,
    kind_of,
    only,
    operate,
    pair,
    source,
)
from tinygrad_nv.ptx.emulator.lowering import WIDTHS, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Immediate, Instruction

INT16S = ("s16", "u16")
WORDS = ("s32", "u32", "s64", "u64")
INTEGERS = (*INT16S, *WORDS)
PACKED = ("s16x2", "u16x2")
TAKES, WRITES = 1, 2  # flags of carry chains
CONDITION_CODE = " cc"  # no register of PTX text is named so
# prmt's modes: selectors for c = 0, 1, 2, 3
PRMT_MODES = {"f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
              "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
              "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232)}


# **** arithmetic ****

def arithmetic(low: FunctionLowering, instruction: Instruction) -> None:
    """add, sub, mul, mad, div, min, max, abs, neg of integers."""
    mnemonic = instruction.mnemonic
    if mnemonic in ("add", "sub"): add(low, mnemonic)
    elif mnemonic in ("mul", "mad"): multiply(low, mnemonic)
    elif mnemonic in ("min", "max"): extreme(low, mnemonic)
    else:
        only(low)
        kind = kind_of(low, *(INTEGERS if mnemonic == "div" else ("s16", "s32", "s64")))
        if mnemonic == "div": operate(low, f"div_{kind}", (kind, kind, kind))
        else: operate(low, f"{mnemonic}_{kind if mnemonic == 'abs' else bits_kind(kind)}", (kind, kind))


def add(low: FunctionLowering, mnemonic: str) -> None:
    """add and sub: wrapping, saturating (.s32), in pairs, or the start of a carry chain."""
    if low.has("cc"): return carry(low, f"{mnemonic}c", 0)
    only(low, "sat")
    if low.has("sat"):
        kind_of(low, "s32")
        operate(low, f"{mnemonic}_sat_s32", ("s32",) * 3)
        return None
    kind = kind_of(low, *INTEGERS, *(PACKED if mnemonic == "add" else ()))
    operate(low, f"{mnemonic}_{'b16x2' if kind in PACKED else bits_kind(kind)}", (kind,) * 3)
    return None


def multiply(low: FunctionLowering, mnemonic: str) -> None:
    """mul and mad: .lo, .hi, .wide; .hi.sat.s32 of mad."""
    if low.has("cc"): return carry(low, "madc", 0)
    only(low, "lo", "hi", "wide", "sat")
    part = low.one_of("lo", "hi", "wide")
    if not part: raise low.fail("which half of the product is not said", ".lo, .hi or .wide")
    kind = kind_of(low, *(("s16", "u16", "s32", "u32") if part == "wide" else INTEGERS))
    wide = f"{kind[0]}{16 * WIDTHS[kind]}" if part == "wide" else kind
    name = f"{mnemonic}_{part}_{bits_kind(kind) if part == 'lo' else kind}"
    if low.has("sat"):
        if name != "mad_hi_s32": raise low.fail(".sat is not emulated here", "mad.hi.sat.s32")
        name = "mad_hi_sat_s32"
    operate(low, name, (wide, kind, kind) if mnemonic == "mul" else (wide, kind, kind, wide))
    return None


def extreme(low: FunctionLowering, mnemonic: str) -> None:
    """min and max, with .relu for signed ones."""
    only(low, "relu")
    kind = kind_of(low, *(("s16x2", "s32") if low.has("relu") else (*INTEGERS, *PACKED)))
    operate(low, f"{mnemonic}_{'relu_' if low.has('relu') else ''}{kind}", (kind,) * 3)


@lowers("rem")
def remainder(low: FunctionLowering, instruction: Instruction) -> None:
    """`rem.type`: the sign is the dividend's."""
    only(low)
    kind = kind_of(low, *INTEGERS)
    operate(low, f"rem_{kind}", (kind,) * 3)


@lowers("sad")
def sum_of_differences(low: FunctionLowering, instruction: Instruction) -> None:
    """`sad.type d, a, b, c`: c + |a - b|."""
    only(low)
    kind = kind_of(low, *INTEGERS)
    operate(low, f"sad_{kind}", (kind,) * 4)


@lowers("mul24", "mad24")
def multiply24(low: FunctionLowering, instruction: Instruction) -> None:
    """Products of 24-bit integers."""
    only(low, "lo", "hi", "sat")
    kind = kind_of(low, "s32", "u32")
    name = f"{instruction.mnemonic}_{'hi' if low.has('hi') else 'lo'}_{kind}"
    if low.has("sat"):
        if name != "mad24_hi_s32": raise low.fail(".sat is not emulated here", "mad24.hi.sat.s32")
        name = "mad24_hi_sat_s32"
    operate(low, name, (kind,) * len(instruction.operands))


# **** carry chains ****

@lowers("addc", "subc", "madc")
def continue_carry(low: FunctionLowering, instruction: Instruction) -> None:
    """Lowers the rest of a carry chain."""
    carry(low, instruction.mnemonic, TAKES)


def carry(low: FunctionLowering, mnemonic: str, takes: int) -> None:
    """An op of a carry chain, by the name of the one that takes the condition code."""
    only(low, "cc", "lo", "hi")
    kind = kind_of(low, *WORDS)
    if mnemonic == "madc": name = "madc_hi_" + kind if low.has("hi") else "madc_lo_" + bits_kind(kind)
    else: name = f"{mnemonic}_{bits_kind(kind)}"
    record = operate(low, name, (kind,) * (4 if mnemonic == "madc" else 3))
    record.e, record.flags = low.register(CONDITION_CODE, "pred"), takes | (WRITES if low.has("cc") else 0)


# **** logic and shifts ****

@lowers("and", "or", "xor")
def logic(low: FunctionLowering, instruction: Instruction) -> None:
    """Bitwise operations of two operands, and of predicates."""
    only(low)
    kind = kind_of(low, "pred", "b16", "b32", "b64")
    operate(low, f"{instruction.mnemonic}_{'b32' if kind == 'b16' else kind}", (kind,) * 3)


@lowers("not", "cnot")
def complement(low: FunctionLowering, instruction: Instruction) -> None:
    """`not`: of bits; `cnot`: of a number as C has it."""
    only(low)
    kind = kind_of(low, "b16", "b32", "b64", *(("pred",) if instruction.mnemonic == "not" else ()))
    operate(low, f"{instruction.mnemonic}_{kind}", (kind,) * 2)


@lowers("lop3")
def lookup(low: FunctionLowering, instruction: Instruction) -> None:
    """`lop3.b32 d, a, b, c, table`, and `lop3.BoolOp.b32 d|p, a, b, c, table, q`: p = (d != 0) BoolOp q."""
    only(low, "or", "and")
    kind_of(low, "b32")
    how = low.one_of("or", "and")
    to, a, b, c, table, *rest = instruction.operands
    if not isinstance(table, Immediate): raise low.fail("the look-up table is not a constant")
    d, p = pair(low, to, "b32", "pred")
    if d < 0: d = low.scratch("b32")
    q = source(low, rest[0], "pred") if rest else -1
    low.emit("lop3_b32", d=d, a=source(low, a, "b32"), b=source(low, b, "b32"), c=source(low, c, "b32"),
             imm=int(table.value) & 255)
    if how and p >= 0:
        low.emit("setp_u32", d=p, a=d, b=low.constant(0, 4), c=q, more=1, flags={"and": 1, "or": 2}[how])


@lowers("shl", "shr")
def shift(low: FunctionLowering, instruction: Instruction) -> None:
    """Shifts by a u32, clamped."""
    only(low)
    kind = kind_of(low, "b16", "b32", "b64", *(INTEGERS if instruction.mnemonic == "shr" else ()))
    name = bits_kind(kind) if instruction.mnemonic == "shl" else kind.replace("b", "u")
    operate(low, f"{instruction.mnemonic}_{name}", (kind, kind, "u32"))


@lowers("shf")
def funnel_shift(low: FunctionLowering, instruction: Instruction) -> None:
    """`shf.{l,r}.{clamp,wrap}.b32 d, a, b, c`: of the 64 bits b:a."""
    only(low, "l", "r", "clamp", "wrap")
    kind_of(low, "b32")
    operate(low, f"shf_{'l' if low.has('l') else 'r'}_{'wrap' if low.has('wrap') else 'clamp'}_b32",
            ("b32", "b32", "b32", "u32"))


# **** bits, bytes, fields ****

@lowers("popc", "clz", "bfind", "brev")
def count(low: FunctionLowering, instruction: Instruction) -> None:
    """Bits counted, found or turned around."""
    only(low, "shiftamt")
    kind = kind_of(low, *(WORDS if instruction.mnemonic == "bfind" else ("b32", "b64")))
    operate(low, f"{instruction.mnemonic}_{kind}", (kind if instruction.mnemonic == "brev" else "u32", kind),
            flags=int(low.has("shiftamt")))


@lowers("fns")
def find_nth(low: FunctionLowering, instruction: Instruction) -> None:
    """`fns.b32 d, mask, base, offset`."""
    only(low)
    operate(low, "fns_b32", ("u32", "b32", "u32", "s32"))


@lowers("bfe", "bfi")
def field(low: FunctionLowering, instruction: Instruction) -> None:
    """Bit fields taken out and put in."""
    only(low)
    out = instruction.mnemonic == "bfe"
    kind = kind_of(low, *(WORDS if out else ("b32", "b64")))
    operate(low, f"{instruction.mnemonic}_{kind}", (kind,) * (2 if out else 3) + ("u32", "u32"))


@lowers("szext", "bmsk")
def small(low: FunctionLowering, instruction: Instruction) -> None:
    """`szext`: the low b bits of a, extended. `bmsk`: b ones from bit a on."""
    only(low, "clamp", "wrap")
    kind = kind_of(low, *(("s32", "u32") if instruction.mnemonic == "szext" else ("b32",)))
    how = low.one_of("wrap", default="clamp")
    operate(low, f"{instruction.mnemonic}_{how}_{kind}", (kind, kind, "u32"))


@lowers("prmt")
def permute(low: FunctionLowering, instruction: Instruction) -> None:
    """`prmt.b32{.mode} d, a, b, c`."""
    only(low, *PRMT_MODES)
    kind_of(low, "b32")
    mode = low.one_of(*PRMT_MODES)
    if not mode: operate(low, "prmt_b32", ("b32",) * 4)
    else: operate(low, "prmt_mode_b32", ("b32",) * 4, imm=pack_selectors(PRMT_MODES[mode]))


def pack_selectors(selectors: tuple[int, ...]) -> int:
    """Four 16-bit numbers as a signed 64-bit one."""
    value = sum(selector << 16 * i for i, selector in enumerate(selectors))
    return value - (1 << 64) if value >> 63 else value


@lowers("dp4a", "dp2a")
def dot(low: FunctionLowering, instruction: Instruction) -> None:
    """Dot products of bytes, and of halves and bytes."""
    only(low, "lo", "hi")
    a, b = kind_of(low, "s32", "u32"), kind_of(low, "s32", "u32", at=1)
    part = "" if instruction.mnemonic == "dp4a" else "hi_" if low.has("hi") else "lo_"
    operate(low, f"{instruction.mnemonic}_{part}{a}_{b}", ("b32",) * 4)
