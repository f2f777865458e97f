"""A matrix in tiles (quant/types.py) in C: codes and factors of a step, W outputs side by side.

Protocol: in C there are `w`, the struct of pointers; a tile `t` and its output `lane` that the first lane is;
`at`, a multiple of 32 columns, and `k`, the first column of the step. Codes have no sign: what they are too
large by is `shift`.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.quant_gemm import decode
from tinygrad_nv.quant.types import TILE, QType, Scale
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec


def problems(spec: QuantGemmSpec) -> list[str]:
    """Why a matrix is not read in tiles; empty when it can be."""
    type, gemm = spec.type, spec.gemm
    if type.layout != "tiles": return ["a matrix that is not in tiles"]
    out = decode.problems(type) + expression.problems(gemm.epilogue)
    if type.element.values or dtypes.is_float(type.element.dtype): out.append(f"codes {type.element}")
    for scale in filter(None, (type.scale, type.outer)):
        if scale.e8m0 or (scale.columns != 16 and scale.columns % INT8_BLOCK):
            out.append(f"{'E8M0 ' if scale.e8m0 else ''}scales of {scale.columns} columns")
    if type.divided: out.append("divided scales")
    if gemm.k % INT8_BLOCK: out.append(f"K of {gemm.k}, a multiple of {INT8_BLOCK} is needed")
    if gemm.parts > 1 and gemm.n % TILE: out.append(f"parts of {gemm.n} columns, no multiple of {TILE}")
    return out


def step_of(type: QType) -> int:
    """Columns that have one scale of the matrix and one of a."""
    return 16 if 16 in (type.scale.columns, type.outer.columns if type.outer else 0) else INT8_BLOCK


def shift(type: QType) -> int:
    """What codes without a sign are too large by."""
    return type.shift + (128 if type.element.dtype == dtypes.int8 else 0)


def factors(spec: QuantGemmSpec) -> dict[str, str]:
    """C of scale, zero and min of W outputs at column k, those that there are."""
    type, made = spec.type, dict[str, str]()
    for name, source, more in (("scale", "scales", "outer"), ("low", "mins", "outer_mins")):
        if source not in spec.buffers: continue
        made[name] = _number(spec, source, type.scale)
        if type.outer is not None: made[name] = f"{_number(spec, more, type.outer)} * {made[name]}"
    if type.zeros: made["zero"] = f"to_f({zeros(spec)})"
    return made


def zeros(spec: QuantGemmSpec) -> str:
    """C of zeros of W outputs at column k, integers."""
    return f"load_u8({_place(spec, 'zeros', spec.type.scale)})"


def _place(spec: QuantGemmSpec, name: str, scale: Scale) -> str:
    at = f"k / {scale.columns}" if scale.columns else "0"
    return f"w.{name} + (t * {spec.buffers[name].shape[1]}ll + {at}) * {TILE} + lane"


def _number(spec: QuantGemmSpec, name: str, scale: Scale) -> str:
    kind = short(scale.dtype)
    text = f"load_{kind}({_place(spec, name, scale)})"
    return f"to_f({text})" if kind in ("s8", "u8") else text


def codes(spec: QuantGemmSpec, step: int, at: int) -> list[str]:
    """C of the quads y0, y1, … of a step, without a sign, of W outputs."""
    type, lines = spec.type, list[str]()
    planes = [("codes", type.low_bits, 0)]
    if "high" in spec.buffers: planes.append(("high", type.bits - type.low_bits, type.low_bits))
    for name, bits, _ in planes:
        each, width = 8 // bits, spec.buffers[name].shape[1]
        for first in range(0, step // 4, each):
            column = f"(k + {4 * first})" if at % (4 * each) == 0 else "at"
            place = f"((t * {width}ll + {column} / {4 * each}) * {TILE} + lane) * 4"
            lines.append(f"const vi {name}{first} = *(const vi_u *)((const u8 *)w.{name} + {place});")
    for quad in range(step // 4):
        terms = []
        for name, bits, to in planes:
            each = 8 // bits
            whole = at // 4 + quad
            right, mask = whole % each * bits - to, ((1 << bits) - 1 << to) * 0x01010101
            read = f"{name}{quad // each * each}"
            if bits == 8: terms.append(read + (" ^ (s32)0x80808080" if signed(type) else ""))
            else:
                if right: read = f"(vi)((vu){read} >> {right})" if right > 0 else f"({read} << {-right})"
                terms.append(f"({read} & (s32){mask:#x})")
        lines.append(f"const vi y{quad} = {' | '.join(terms)};")
    return lines


def signed(type: QType) -> bool:
    """Whether codes of 8 bits have a sign in memory."""
    return type.element.dtype == dtypes.int8
