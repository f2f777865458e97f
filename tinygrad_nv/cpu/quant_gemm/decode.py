"""Elements of a quantised matrix in C: float32 numbers of codes, a vector of columns of a row at a time.

Protocol: `functions(type, n, k)` is text that defines

    matrix                       a struct of the pointers to buffers; `declare_matrix` makes one of them
    value_(w, n, k)              W numbers of codes from column k on, a multiple of W, which are all there
    factors_(w, n, k)            scale, zero (shift in it) and min of these columns, as vectors of W lanes
    weight_(v, f)                numbers with factors: elements
    weights_(w, n, k), weights_n_(w, n, k, count)       both at once; of `count` columns, the others 0

Fields of 1, 2 and 4 bits are read as one integer that all lanes shift by their own distance. A scale that is
the same for W columns is read once for them. Codebooks are looked up in registers where the instruction set
has permutations by lane.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from tinygrad.dtype import DType

from tinygrad_nv.cpu.expression import c_float
from tinygrad_nv.cpu.kernel import C_TYPES, c_type
from tinygrad_nv.quant.types import Buffer, QType, Scale, buffers
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec


def problems(type: QType) -> list[str]:
    """Why elements cannot be decoded; empty when they can."""
    found = {"codes": type.element.dtype, "scales": type.scale.dtype}
    if type.outer is not None: found["outer scales"] = type.outer.dtype
    return [f"{name} of {dtype.name}" for name, dtype in found.items() if short(dtype) not in C_TYPES]


def untaken(spec: QuantGemmSpec) -> list[str]:
    """Why elements cannot be multiplied with numbers of a in float32."""
    layout = spec.type.layout
    out = problems(spec.type) + ["activations of int8"] * (spec.int8 or spec.codes)
    return out + [layout] * (layout != "rows")


def run_of(type: QType, k: int, lanes: int) -> int:
    """So many columns from a multiple of them on have the same factors; less than a vector: no number of
    columns does."""
    most = 0
    for scale in filter(None, (type.scale, type.outer)): most = gcd(most, scale.columns)
    most = most or -(-k // lanes) * lanes
    return most if most % lanes == 0 else 1


def pointers(have: Mapping[str, Buffer]) -> list[tuple[str, str]]:
    """The buffers as a kernel's inputs: C types and names."""
    return [(c_type(one.dtype), name) for name, one in have.items()]


def declare_matrix(have: Mapping[str, Buffer]) -> str:
    """C that declares `w`, the struct of all pointers."""
    return f"const matrix w = {{{', '.join(have)}}};"


def struct(have: Mapping[str, Buffer]) -> str:
    """The struct of the pointers to buffers."""
    fields = "\n".join(f"  const {kind} *{name};" for kind, name in pointers(have))
    return f"""
typedef struct {{
{fields}
}} matrix;"""


def functions(type: QType, n: int, k: int, lanes: int) -> str:
    """The functions, of a matrix of n rows and k columns."""
    have = buffers(type, n, k)
    return f"""{struct(have)}
typedef struct {{ vf scale, zero, min; }} factors;
{_value(type, have, lanes)}
{_factors(type, have, k, lanes)}
INLINE vf weight_(vf v, factors f) {{
  {'v -= f.zero;' if type.zeros or type.shift else ''}
  return v * f.scale{' - f.min' if type.mins else ''};
}}
INLINE vf weights_(matrix w, s64 n, s64 k) {{ return weight_(value_(w, n, k), factors_(w, n, k)); }}
INLINE vf weights_n_(matrix w, s64 n, s64 k, s64 count) {{
  vf made = weight_(value_n_(w, n, k, count), factors_(w, n, k));
  for (int i = 0; i < W; i++) if (i >= count) made[i] = 0;
  return made;
}}"""


# **** codes ****

def _value(type: QType, have: dict[str, Buffer], lanes: int) -> str:
    whole, some = "", ""
    if type.bits == 8: whole, some = (f"load{s}_{short(type.element.dtype)}" for s in ("", "_n"))
    row = have["codes"].shape[1]
    if whole:
        floats = "{}" if short(type.element.dtype) in ("e4m3", "e5m2") else "to_f({})"
        text, tail = (floats.format(f"{name}(w.codes + n * {row}ll + k{more})")
                      for name, more in ((whole, ""), (some, ", count")))
        looked = ""
    else:
        low, rest = type.low_bits, type.bits - type.low_bits
        looked, codes = _fields("codes", low, lanes), f"codes_(w.codes + n * {row}ll, k)"
        few = f"codes_n_(w.codes + n * {row}ll, k, count)"
        if rest:
            high = have["high"].shape[1]
            looked += _fields("high", rest, lanes)
            codes += f" | high_(w.high + n * {high}ll, k) << {low}"
            few += f" | high_n_(w.high + n * {high}ll, k, count) << {low}"
        looked += book(type.element.values, type.bits) if type.element.values else ""
        number = "look_({})" if type.element.values else "to_f({})"
        text, tail = number.format(codes), number.format(few)
    return f"""{looked}
INLINE vf value_(matrix w, s64 n, s64 k) {{ return {text}; }}
INLINE vf value_n_(matrix w, s64 n, s64 k, s64 count) {{ return {tail}; }}"""


def _fields(name: str, bits: int, lanes: int) -> str:
    """Functions of W fields of a row, from k on, a multiple of W; and of `count`, one by one."""
    total, mask = bits * lanes, (1 << bits) - 1
    if total == 64:
        read = "const VECTOR(s32, 2) x = *(const pair_u *)(p + k / 2);\n" \
               "  vi all = __builtin_shufflevector(x, x, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);\n" \
               "  return (vi)((vu)all >> (vu)((iota_() & 7) * 4)) & 15;"
        types = "typedef VECTOR(s32, 2) pair_u __attribute__((aligned(1), may_alias));"
    else:
        kind, shift = {4: "u8", 8: "u8", 16: "u16", 32: "u32"}[total], "(k & 4) + " if total == 4 else ""
        types = f"typedef {kind} {name}_u __attribute__((aligned(1), may_alias));"
        read = f"const u32 x = *(const {name}_u *)(p + k * {bits} / 8);\n" \
               f"  return (vi)((vu)x >> (vu)({shift}iota_() * {bits})) & {mask};"
    return f"""
{types}
INLINE vi {name}_(const u8 *p, s64 k) {{
  {read}
}}
INLINE vi {name}_n_(const u8 *p, s64 k, s64 count) {{
  vi x = (vi)0;
  for (s64 i = 0; i < W && i < count; i++) {{
    const s64 bit = (k + i) * {bits};
    x[i] = p[bit / 8] >> bit % 8 & {mask};
  }}
  return x;
}}"""


def book(given: Sequence[float], bits: int) -> str:
    """The function look_(codes), of the numbers that codes of `bits` stand for. Of 4 bits AVX-512
    ignores what is above them."""
    values = [*given, *[0.0] * (1 << bits)][:1 << bits]
    numbers = ", ".join(c_float(value) for value in values)
    read = "vf x;\n  for (int i = 0; i < W; i++) x[i] = book_[at[i]];\n  return x;"
    quick = f"""#if AVX512
  vf x;
  __asm__("vpermps %2, %1, %0" : "=v"(x) : "v"(at), "v"(*(const vf_u *)book_));
  return x;
#elif W == 8 && HAVE_FMA
  vf low, high;
  __asm__("vpermps %2, %1, %0" : "=x"(low) : "x"(at), "x"(*(const vf_u *)book_));
  __asm__("vpermps %2, %1, %0" : "=x"(high) : "x"(at), "x"(*(const vf_u *)(book_ + W)));
  return pick(at > 7, high, low);
#else
  {read}
#endif""" if len(values) == 16 else read
    return f"""
static const float book_[{len(values)}] = {{{numbers}}};
INLINE vf look_(vi at) {{
{quick}
}}"""


# **** scales ****

def _factors(type: QType, have: dict[str, Buffer], k: int, lanes: int) -> str:
    """Each lane's own where blocks are no multiple of W columns."""
    def number(buffer: str, scale: Scale, dtype: DType, e8m0: bool = False) -> str:
        down = f"n / {scale.rows}" if scale.rows else "0"
        at = f"({down}) * {have[buffer].shape[1]}ll + "
        kind = "e8m0" if e8m0 else short(dtype)
        if scale.columns == 0 or scale.columns % lanes == 0:
            return f"spread_{kind}(w.{buffer} + {at}{f'k / {scale.columns}' if scale.columns else '0'})"
        lane = f"s64 at = {at}(k + i < {k} ? k + i : {k - 1}) / {scale.columns}; " \
               f"x[i] = spread_{kind}(w.{buffer} + at)[0];"
        return f"({{ vf x; for (s64 i = 0; i < W; i++) {{ {lane} }} x; }})"
    s, outer = type.scale, type.outer
    scale, low = number("scales", s, s.dtype, s.e8m0), number("mins", s, s.dtype, s.e8m0) if type.mins else ""
    if outer is not None:
        larger = number("outer", outer, outer.dtype, outer.e8m0)
        scale = f"{scale} / {larger}" if type.divided else f"{larger} * {scale}"
        if type.mins: low = f"{number('outer_mins', outer, outer.dtype, outer.e8m0)} * {low}"
    zero = number("zeros", s, have["zeros"].dtype) if type.zeros else "(vf)0.f"
    if type.shift: zero += f" + {float(type.shift)}f"
    return f"""{SPREAD}
INLINE factors factors_(matrix w, s64 n, s64 k) {{
  factors f;
  f.scale = {scale};
  f.zero = {zero};
  f.min = {low or '(vf)0.f'};
  return f;
}}"""


# one number in all lanes
SPREAD = """
INLINE vf spread_f32(const float *p) { return (vf)*p; }
INLINE vf spread_bf16(const u16 *p) { return as_f((vi)((s32)*p << 16)); }
INLINE vf spread_f16(const u16 *p) { return wide_f16((vh)*p); }
INLINE vf spread_e4m3(const u8 *p) { return wide_e4m3((vb)*p); }
INLINE vf spread_e5m2(const u8 *p) { return wide_e5m2((vb)*p); }
INLINE vf spread_u8(const u8 *p) { return (vf)(float)*p; }
INLINE vf spread_s8(const s8 *p) { return (vf)(float)*p; }
INLINE vf spread_e8m0(const u8 *p) {
  return as_f((vi)(*p == 0 ? 1 << 22 : *p == 255 ? 0x7fc00000 : (s32)*p << 23));
}"""
