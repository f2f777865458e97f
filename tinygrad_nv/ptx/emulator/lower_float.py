"""Floating-point arithmetic to ops of float.c and half.c, and the mnemonics it shares with integers.

Protocol: the flags of float.c stand for .ftz, .sat, .relu, .NaN, .xorsign.abs and .oob; `more` is the
rounding. f16 and bf16 ops work on `vector` values in a word.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator import lower_integer
from tinygrad_nv.ptx.emulator.lower_operate import ROUNDINGS, flags_of, kind_of, only, operate
from tinygrad_nv.ptx.emulator.lowering import FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Instruction

PACKED_FLOAT16S = {"f16": "f16", "f16x2": "f16", "bf16": "bf16", "bf16x2": "bf16"}
FLOATS = ("f32", "f64", *PACKED_FLOAT16S)
DIRECTED = ("rn", "rz", "rm", "rp")


def rounding(low: FunctionLowering) -> int:
    """The instruction's rounding, to nearest even when it names none."""
    return ROUNDINGS.index(low.one_of(*DIRECTED, default="rn"))


def of_integers(low: FunctionLowering) -> bool:
    """Whether none of the instruction's types is a float's."""
    return not set(low.types()) & set(FLOATS)


def half(low: FunctionLowering, handler: str, kind: str, sources: int) -> None:
    """An op of half.c."""
    operate(low, f"{handler}_{PACKED_FLOAT16S[kind]}", (kind,) * (sources + 1), flags=flags_of(low),
            vector=2 if kind.endswith("x2") else 1)


def lower_rounding(low: FunctionLowering, handler: str, kind: str, sources: int) -> None:
    """An op of float.c that rounds in any direction."""
    mode = rounding(low)
    name = f"{handler}_round_f32" if kind == "f32" and mode else f"{handler}_{kind}"
    operate(low, name, (kind,) * (sources + 1), flags=flags_of(low), more=mode)


@lowers("add", "sub", "mul", "mad", "fma")
def arithmetic(low: FunctionLowering, instruction: Instruction) -> None:
    """Sums and products, of floats and integers. mad of floats is fma."""
    mnemonic = instruction.mnemonic
    if mnemonic != "fma" and of_integers(low): return lower_integer.arithmetic(low, instruction)
    name, sources = ("fma", 3) if mnemonic in ("mad", "fma") else (mnemonic, 2)
    only(low, *DIRECTED, "ftz", "sat", *(("relu", "oob") if name == "fma" else ()))
    kind = kind_of(low, *FLOATS)
    if kind in PACKED_FLOAT16S: half(low, "fma_oob" if low.has("oob") else name, kind, sources)
    else: lower_rounding(low, name, kind, sources)
    return None


@lowers("div", "rcp", "sqrt")
def quotient(low: FunctionLowering, instruction: Instruction) -> None:
    """Division, reciprocal and root, rounded or approximate; div of integers."""
    name = instruction.mnemonic
    if name == "div" and of_integers(low): return lower_integer.arithmetic(low, instruction)
    only(low, *DIRECTED, "approx", "full", "ftz")
    kind = kind_of(low, "f32", "f64")
    sources = 2 if name == "div" else 1
    # rcp.approx of f64 without .ftz, which ptxas refuses, is taken for a full one
    rough = (name, kind, low.has("ftz")) == ("rcp", "f64", True) or (name, kind) == ("div", "f32")
    if low.has("approx") and rough:
        operate(low, f"{name}_approx_{kind}", (kind,) * (sources + 1), flags=flags_of(low))
    else: lower_rounding(low, name, kind, sources)
    return None


@lowers("rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
def approximate(low: FunctionLowering, instruction: Instruction) -> None:
    """Functions that PTX has as approximations alone."""
    name = instruction.mnemonic
    only(low, "approx", "ftz")
    halves = tuple(PACKED_FLOAT16S) if name in ("ex2", "tanh") else ()
    kind = kind_of(low, "f32", *halves, *(("f64",) if name == "rsqrt" else ()))
    if kind in PACKED_FLOAT16S: half(low, name, kind, 1)
    elif kind == "f64": operate(low, "rsqrt_approx_ftz_f64" if low.has("ftz") else "rsqrt_f64", (kind, kind))
    else: operate(low, f"{name}_f32", (kind, kind), flags=flags_of(low))


@lowers("min", "max")
def extreme(low: FunctionLowering, instruction: Instruction) -> None:
    """The smaller or the larger."""
    if of_integers(low): return lower_integer.arithmetic(low, instruction)
    only(low, "ftz", "NaN", "xorsign", "abs")
    kind = kind_of(low, *FLOATS)
    if kind in PACKED_FLOAT16S: half(low, instruction.mnemonic, kind, 2)
    else: operate(low, f"{instruction.mnemonic}_{kind}", (kind,) * 3, flags=flags_of(low))
    return None


@lowers("abs", "neg")
def sign(low: FunctionLowering, instruction: Instruction) -> None:
    """The sign taken away or turned."""
    if of_integers(low): return lower_integer.arithmetic(low, instruction)
    only(low, "ftz")
    kind = kind_of(low, *FLOATS)
    if kind in PACKED_FLOAT16S: half(low, instruction.mnemonic, kind, 1)
    else: operate(low, f"{instruction.mnemonic}_{kind}", (kind, kind), flags=flags_of(low))
    return None


@lowers("copysign")
def copysign(low: FunctionLowering, instruction: Instruction) -> None:
    """`copysign.type d, a, b`: b with the sign of a."""
    only(low)
    kind = kind_of(low, "f32", "f64")
    operate(low, f"copysign_{kind}", (kind,) * 3)
