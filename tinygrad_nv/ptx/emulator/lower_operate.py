"""Shared by the lowerings of arithmetic: operands of an instruction to the fields of one op, and checks.

Protocol: `operate(low, handler, kinds)` emits one op whose destination is the first operand and whose sources
are the others, in the manual's order, as fields a, b, c, e. Registers must be as wide as their types.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lowering import WIDTHS, FunctionLowering, OpRecord
from tinygrad_nv.ptx.syntax import Instruction, Operand, Pair, Register, Sink

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")  # formats.h: enum { RN, … }
FTZ, SAT, RELU, NANS, XOR_SIGN, OOB = 1, 2, 4, 8, 16, 32  # float.c


def instruction_of(low: FunctionLowering) -> Instruction:
    """The current instruction."""
    assert low.current is not None
    return low.current


def only(low: FunctionLowering, *modifiers: str) -> None:
    """Refuses modifiers that are neither types nor among `modifiers`."""
    for word in instruction_of(low).modifiers:
        if word not in WIDTHS and word not in modifiers: raise low.fail(f".{word} is not emulated here")


def kind_of(low: FunctionLowering, *kinds: str, at: int = 0) -> str:
    """The instruction's type number `at`, which must be one of `kinds`."""
    types = low.types()
    if len(types) <= at: raise low.fail("a type is missing", ", ".join(f".{kind}" for kind in kinds))
    if types[at] not in kinds:
        raise low.fail(f"type .{types[at]} is not emulated here", ", ".join(f".{kind}" for kind in kinds))
    return types[at]


def bits_kind(kind: str) -> str:
    """"b32" for any type of that width."""
    return f"b{8 * WIDTHS[kind]}" if WIDTHS[kind] else "pred"


def check_width(low: FunctionLowering, operand: Operand, kind: str) -> Operand:
    """The operand, if it can hold a value of the type: registers have its width."""
    if isinstance(operand, Register) and operand.kind != "special":
        have, want = low.width_of(operand), {0: 0, 8: 8, 16: 16}.get(WIDTHS[kind], 4)
        if have != want: raise low.fail(f"{operand.name} is a .{operand.kind} register", f"one for .{kind}")
    return operand


def source(low: FunctionLowering, operand: Operand, kind: str) -> int:
    """The place of a source, its width checked."""
    return low.source(check_width(low, operand, kind), kind)


def dest(low: FunctionLowering, operand: Operand, kind: str) -> int:
    """The place of a destination, its width checked."""
    return low.dest(check_width(low, operand, kind), kind)


def operate(low: FunctionLowering, handler: str, kinds: tuple[str, ...], **fields: int) -> OpRecord:
    """Emits an op; `kinds` are the types of the destination and of each source."""
    operands = instruction_of(low).operands
    if len(operands) != len(kinds):
        raise low.fail(f"{len(operands)} operands", f"{len(kinds)} operands")
    places = {name: source(low, operand, kind)
              for name, operand, kind in zip("abce", operands[1:], kinds[1:], strict=False)}
    return low.emit(handler, d=dest(low, operands[0], kinds[0]), **places, **fields)


def pair(low: FunctionLowering, operand: Operand, first: str, second: str) -> tuple[int, int]:
    """The places of `d|p`, -1 for what is a sink or absent."""
    items = (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())
    one, other = (-1 if isinstance(item, Sink) else dest(low, item, kind)
                  for item, kind in zip(items, (first, second), strict=True))
    return one, other


def flags_of(low: FunctionLowering) -> int:
    """The flags of float.c that the instruction's modifiers ask for."""
    named = {"ftz": FTZ, "sat": SAT, "relu": RELU, "NaN": NANS, "xorsign": XOR_SIGN, "oob": OOB}
    return sum(flag for word, flag in named.items() if low.has(word))
