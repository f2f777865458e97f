"""A matrix in tiles (quant/types.py) in C: codes and factors of a step, W outputs side by side.

Protocol: in C there are `w`, the struct of pointers; a tile `t` and its output `lane` that the first lane is;
`at`, a multiple of 32 columns, and `k`, the first column of the step. Codes become bytes without a sign; what
those are too large by is `shift`. Of a codebook bytes are its numbers' multiples of their least significant
bit (`Element.lsb`), looked up. Factors of all columns are left to the end (`last`).
"""
from __future__ import annotations

from math import gcd

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.quant_gemm import decode
from tinygrad_nv.quant.types import TILE, QType, Scale
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec


def problems(spec: QuantGemmSpec, codes: bool = False) -> list[str]:
    """Why a matrix is not read in tiles; empty when it can be. `codes`: by a template of activations that are
    codes."""
    type, gemm = spec.type, spec.gemm
    if type.layout != "tiles": return ["a matrix that is not in tiles"]
    out = decode.problems(type) + expression.problems(gemm.epilogue)
    if spec.codes != codes: out.append(f"activations of {short(gemm.a.dtype)}")
    if type.element.values and (type.bits != 4 or type.shift or type.zeros):
        out.append(f"codes {type.element}")
    if spec.int8 and not type.element.lsb: out.append(f"codes {type.element} times int8")
    for scale in filter(None, (type.scale, type.outer)):
        if scale.columns != 16 and scale.columns % INT8_BLOCK:
            out.append(f"scales of {scale.columns} columns")
    if type.divided and not _at_last(type): out.append("divided scales of groups")
    if gemm.k % INT8_BLOCK: out.append(f"K of {gemm.k}, a multiple of {INT8_BLOCK} is needed")
    if gemm.parts > 1 and gemm.n % TILE: out.append(f"parts of {gemm.n} columns, no multiple of {TILE}")
    return out


def step_of(type: QType) -> int:
    """Columns that have one scale of the matrix and one of a."""
    return 16 if 16 in (type.scale.columns, type.outer.columns if type.outer else 0) else INT8_BLOCK


def run_of(type: QType, k: int) -> int:
    """Columns that have one scale of the matrix, a divisor of K: the last scale may be of fewer columns."""
    return gcd(k, *(scale.columns for scale in (type.scale, type.outer) if scale is not None))


def shift(type: QType) -> int:
    """Returns what bytes without a sign are too large by."""
    if type.element.values and type.element.lsb: return -int(min(type.element.values) / type.element.lsb)
    return type.shift + (128 if type.element.dtype == dtypes.int8 else 0)


def largest(type: QType) -> int:
    """The largest byte without a sign."""
    if not type.element.values: return (1 << type.bits) - 1
    return shift(type) + int(max(type.element.values) / type.element.lsb)


def factors(spec: QuantGemmSpec, times: float = 1) -> dict[str, str]:
    """C of scale, times `times`, zero and min of W outputs at column k, those that there are."""
    type, made = spec.type, dict[str, str]()
    for name, source, more in (("scale", "scales", "outer"), ("low", "mins", "outer_mins")):
        if source not in spec.buffers: continue
        made[name] = _number(spec, source, type.scale)
        if type.outer is not None and not _at_last(type):
            made[name] = f"{_number(spec, more, type.outer)} * {made[name]}"
    if times != 1: made["scale"] += f" * {times.hex()}f"
    if type.zeros: made["zero"] = f"to_f({zeros(spec)})"
    return made


def last(spec: QuantGemmSpec) -> str:
    """C behind the sum of all columns of W outputs."""
    if spec.type.outer is None or not _at_last(spec.type): return ""
    return f" {'/' if spec.type.divided else '*'} {_number(spec, 'outer', spec.type.outer)}"


def _at_last(type: QType) -> bool:
    return type.outer is not None and type.outer.columns == 0 and not type.mins


def zeros(spec: QuantGemmSpec) -> str:
    """C of zeros of W outputs at column k, integers."""
    return f"load_u8({_place(spec, 'zeros', spec.type.scale)})"


def _place(spec: QuantGemmSpec, name: str, scale: Scale) -> str:
    at = f"k / {scale.columns}" if scale.columns else "0"
    return f"w.{name} + (t * {spec.buffers[name].shape[1]}ll + {at}) * {TILE} + lane"


def _number(spec: QuantGemmSpec, name: str, scale: Scale) -> str:
    kind = "e8m0" if scale.e8m0 else short(scale.dtype)
    text = f"load_{kind}({_place(spec, name, scale)})"
    return f"to_f({text})" if kind in ("s8", "u8") else text


def loads(spec: QuantGemmSpec, step: int, at: int) -> list[str]:
    """C of the words of a step's codes, codes0, … and high0, …, each named after the first quad in it."""
    lines = []
    for name, bits, _ in planes(spec):
        each, width = 8 // bits, spec.buffers[name].shape[1]
        for first in range(0, step // 4, each):
            column = f"(k + {4 * first})" if at % (4 * each) == 0 else "at"
            place = f"((t * {width}ll + {column} / {4 * each}) * {TILE} + lane) * 4"
            lines.append(f"const vi {name}{first} = *(const vi_u *)((const u8 *)w.{name} + {place});")
    return lines


def quads(spec: QuantGemmSpec, step: int, at: int) -> list[str]:
    """C of the quads y0, y1, … of a step, bytes without a sign, of its words."""
    type, lines = spec.type, []
    for quad in range(step // 4):
        terms = []
        for name, bits, to in planes(spec):
            each = 8 // bits
            whole = at // 4 + quad
            right, mask = whole % each * bits - to, ((1 << bits) - 1 << to) * 0x01010101
            read = f"{name}{quad // each * each}"
            if bits == 8: terms.append(read + (" ^ (s32)0x80808080" if is_signed(type) else ""))
            else:
                if right: read = f"(vi)((vu){read} >> {right})" if right > 0 else f"({read} << {-right})"
                terms.append(f"({read} & (s32){mask:#x})")
        value = " | ".join(terms)
        lines.append(f"const vi y{quad} = {f'bytes_({value})' if type.element.values else value};")
    return lines


def planes(spec: QuantGemmSpec) -> list[tuple[str, int, int]]:
    """Name, bits, and the lowest bit's place in codes."""
    low, bits = spec.type.low_bits, spec.type.bits
    return [("codes", low, 0), *[("high", bits - low, low)] * (bits > low)]


def is_signed(type: QType) -> bool:
    """Whether codes of 8 bits have a sign in memory."""
    return type.element.dtype == dtypes.int8


def functions(type: QType) -> str:
    """The functions that quads and factors call."""
    text = E8M0 if type.scale.e8m0 else ""
    if not (type.element.values and type.element.lsb): return text
    numbers = ", ".join(str(int(value / type.element.lsb) + shift(type)) for value in type.element.values)
    return f"""{text}
static const u8 table_[64] __attribute__((aligned(64))) = {{{', '.join([numbers] * 4)}}};{BYTES}"""


E8M0 = """
INLINE vf load_e8m0(const u8 *p) {
  const vi x = load_u8(p);
  return as_f(pick_i(x == 0, (vi)(1 << 22), pick_i(x == 255, (vi)0x7fc00000, x << 23)));
}"""
# the table's bytes in place of codes of 4 bits
BYTES = """
INLINE vi bytes_(vi codes) {
#if HAVE_FMA
  vi x;
  __asm__("vpshufb %2, %1, %0" : "=v"(x) : "v"(*(const vi *)table_), "v"(codes));
  return x;
#else
  typedef VECTOR(u8, 4 * W) quads;
  quads x = (quads)codes;
  for (int i = 0; i < 4 * W; i++) x[i] = table_[x[i]];
  return (vi)x;
#endif
}"""
