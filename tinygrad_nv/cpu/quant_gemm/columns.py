"""Columns of a matrix in tiles as float32 numbers, in C.

Protocol: `step(spec, isa, columns, at)` are lines, and an expression of each column of a step, W outputs side
by side: numbers less shift and zero, of codes in words that the lines load (tiles.py). Scales make up for
what they are too small by: `lsb`, and of 8-bit floats `larger`; or `scale_factor`, where activations are
raised.

Four bits, and codebooks of them, are looked up in one register of AVX-512 (in two of AVX2, where numbers are
no integers). The bits of an 8-bit float become those of a float32 whose exponent has the same bits: it is
smaller by a power of two, of which `RAISED` activations have one part and scales the other: activations below
2^64 and scales below 2^71 stay finite, and products down to 2^-70 normal.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.quant_gemm import decode, tiles
from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

RAISED = "0x1p64f"      # what activations are multiplied with for 8-bit floats
# of 8-bit floats: how far to shift from the highest bits, what stays, and log2 of how much smaller that is
_SMALL = {dtypes.fp8e4m3: (4, 0x87f00000, 120), dtypes.fp8e5m2: (3, 0x8fe00000, 112)}


def is_small(type: QType) -> bool:
    """Whether codes are 8-bit floats."""
    return type.element.dtype in _SMALL


def scale_factor(type: QType, isa: ISA) -> float:
    """Returns what scales are multiplied with, where activations are raised."""
    return 2.0 ** (_SMALL[type.element.dtype][2] - 64) if is_small(type) else lsb(type, isa)


def lsb(type: QType, isa: ISA) -> float:
    """Returns what scales are multiplied with."""
    return 1.0 if is_small(type) or _uses_lookup(type, isa) else type.element.lsb


def larger(type: QType) -> str:
    """C behind a column, where activations are not raised."""
    return f" * 0x1p{_SMALL[type.element.dtype][2]}f" if is_small(type) else ""


def functions(type: QType, isa: ISA) -> str:
    """The functions that columns call."""
    if not _uses_lookup(type, isa): return ""
    numbers = type.element.values or [float(code - type.shift) for code in range(16)]
    return decode.book(numbers, 4)


def step(spec: QuantGemmSpec, isa: ISA, columns: int, at: int) -> tuple[list[str], list[str]]:
    """Lines of C, and an expression of each column."""
    type, lines = spec.type, tiles.loads(spec, columns, at)
    signed, looked_up = tiles.is_signed(type), _uses_lookup(type, isa)
    if not (looked_up or signed or is_small(type)): lines += tiles.quads(spec, columns, at)
    shift = 0 if looked_up or signed or is_small(type) else tiles.shift(type)
    zero = " + ".join([*["zero"] * type.zeros, *[f"{float(shift)}f"] * (shift > 0)])
    if zero: lines.append(f"const vf less = (vf){zero};")
    out = []
    for column in range(columns):
        quad, byte = column // 4, column % 4 * 8
        if looked_up:
            code = f"(vi)((vu)codes{quad // 2 * 2} >> {byte + quad % 2 * 4})"
            value = f"look_({code if _wide(isa) else f'{code} & 15'})"
        elif is_small(type):
            right, mask, _ = _SMALL[type.element.dtype]
            value = f"as_f((vi)((vu)codes{quad} << {24 - byte}) >> {right} & (s32){mask:#x})"
        elif signed: value = f"to_f((vi)((vu)codes{quad} << {24 - byte}) >> 24)"
        else: value = f"to_f((vi)((vu)y{quad} >> {byte}) & 255)"
        out.append(f"({value} - less)" if zero else value)
    return lines, out


def _wide(isa: ISA) -> bool: return isa.lanes == 16 and not isa.emulated


def _uses_lookup(type: QType, isa: ISA) -> bool:
    return type.bits == 4 and (_wide(isa) or bool(type.element.values and not type.element.lsb))
