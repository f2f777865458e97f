"""Packing of an operand of the blocked GEMM: from any strides to what the innermost loop reads.

Protocol: units (gemm.h) of 32 bits, zero where there is no element. `packing` makes the C function

    pack_a(p, to, rows, most, count)    to[row][unit], rows `pitch` units apart; vectors lie along k
    pack_b(p, to, rows, most, count)    to[panel][unit][row], panels of `pitch` rows; vectors lie along mn

p is the first element, `rows` of `most` there are, `count` elements of each. Where elements lie side by side
in memory the way they do in the panel they are copied, a vector at a time; else W x W units are transposed
in registers. Rows of b beyond the last become zeros, a vector at a time; what is left over at the edges
goes one unit at a time.
"""
from __future__ import annotations

from typing import Protocol

from tinygrad.dtype import DType

from tinygrad_nv.cpu.gemm.layout import PER
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import INT8S


class Packed(Protocol):
    """An operand in memory: elements from one row of a, or column of b, to the next, and along k."""
    @property
    def dtype(self) -> DType: ...
    @property
    def mn(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def major(self) -> str: ...


AHEAD = 8  # units along k that are fetched ahead


def packing(side: str, operand: Packed, kind: str, pitch: int, deep: int = 0, flip: bool = False,
            suffix: str = "") -> str:
    """The function that packs side "a" or "b", whose panels are `deep` units. `flip` turns the highest bit of
    bytes, so that their sign is taken for a number's or the other way round. `suffix` ends its name."""
    per, along, element = PER[kind], "k" if operand.major != "MN" else "mn", c_type(operand.dtype)
    straight = (side == "a") == (along == "k")
    high, wide = ("W", "W") if not straight else ("1", "W") if side == "a" else ("W", "1")  # of a tile

    def to(row: str, unit: str) -> str:
        if side == "a": return f"to + ({row}) * {pitch} + ({unit})"
        return f"to + (u64)({row}) / {pitch} * {pitch * deep} + ({unit}) * {pitch} + (u64)({row}) % {pitch}"

    def at(row: str, unit: str) -> str:
        return f"p + ({row}) * (s64){operand.mn} + ({unit}) * (s64){per * operand.k}"
    load = _vector(operand, kind, along, flip)
    if straight:
        # rows of a large matrix lie in pages of their own, which no processor fetches ahead across
        ahead = "".join(f"__builtin_prefetch({at('r', f'u + {AHEAD}')} + {i * operand.k});"
                        for i in range(per if along == "mn" else 0))
        fast = f"const {element} *q = {at('r', 'u')}; {ahead} *(vi_u *)({to('r', 'u')}) = {load};"
    else:
        source = at("r + i", "u") if along == "k" else at("r", "u + i")
        target = to("r + i", "u") if side == "a" else to("r", "u + i")
        fast = f"""vi x[W];
#pragma clang loop unroll(full)
    for (int i = 0; i < W; i++) {{ const {element} *q = {source}; x[i] = {load}; }}
    transpose(x);
#pragma clang loop unroll(full)
    for (int i = 0; i < W; i++) *(vi_u *)({target}) = x[i];"""
    clear = "" if side == "a" else f"""
    if (r >= rows && r + {high} <= most) {{
      for (s64 j = u; j < u + {wide} && j < units; j++) *(vi_u *)({to('r', 'j')}) = (vi)0;
      continue;
    }}"""
    loops = [f"for (s64 r = 0; r < most; r += {high})", f"for (s64 u = 0; u < units; u += {wide})"]
    if along == "mn": loops.reverse()
    return f"""{_unit(side + suffix, operand, kind, flip)}
NOINLINE void pack_{side}{suffix}(const {element} *restrict p, u32 *restrict to, s64 rows, s64 most, s64
count) {{
  const s64 units = (count + {per - 1}) / {per};
  {loops[0]} {loops[1]} {{
    if (r + {high} <= rows && (u + {wide}) * {per} <= count) {{ {fast} continue; }}{clear}
    for (s64 i = r; i < r + {high} && i < most; i++) for (s64 j = u; j < u + {wide} && j < units; j++)
      *({to('i', 'j')}) = i < rows ? unit_{side}{suffix}({at('i', 'j')}, count - j * {per}) : 0;
  }}
}}"""


def _flip_signs(flip: bool) -> str: return " ^ (s32)0x80808080" if flip else ""


def _vector(operand: Packed, kind: str, along: str, flip: bool) -> str:
    """C of W units from q on, along k or along mn."""
    name, k = short(operand.dtype), operand.k
    if kind == "fma":
        made = f"load_{name}(q)" if 1 in (operand.k, operand.mn) else f"strided_{name}(q, {k}, W)"
        return f"as_i(to_f({made}))" if operand.dtype in INT8S else f"as_i({made})"
    if along == "k" and k == 1: return f"*(const vi_u *)q{_flip_signs(flip)}"
    per, raw = PER[kind], {"pair": "u16", "quad": "u8"}[kind]
    element = f"(const {raw} *)q"
    one = [f"load_{raw}({element} + {i * k})" if along == "mn" else
           f"strided_{raw}({element} + {i * k}, {per * k}, W)" for i in range(per)]
    return f"({' | '.join(f'{x} << {i * 32 // per}' for i, x in enumerate(one))}){_flip_signs(flip)}"


def _unit(side: str, operand: Packed, kind: str, flip: bool) -> str:
    """The function of a single unit, of which `left` elements are there."""
    name, per = short(operand.dtype), PER[kind]
    if kind == "fma":
        value = f"(float)one_{name}(p)" if operand.dtype in INT8S else f"one_{name}(p)"
        body = f"return as_u((vf){value})[0];"
    else:
        raw = {"pair": "u16", "quad": "u8"}[kind]
        body = (f"u32 x = 0; for (s64 i = 0; i < {per} && i < left; i++) "
                f"x |= (u32)(({raw})p[i * {operand.k}]) << (i * {32 // per}); "
                f"return x{' ^ 0x80808080u' if flip else ''};")
    return f"INLINE u32 unit_{side}(const {c_type(operand.dtype)} *p, s64 left) {{ {body} }}"
