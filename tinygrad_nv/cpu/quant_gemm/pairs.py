"""Rows of bfloat16 times a matrix in tiles of codes of 2, 4 or 8 bits: dot products of pairs (VDPBF16PS).

Protocol: a word of 32 bits has codes of 32 / bits columns of an output. A shift and a look-up of 16-bit lanes
(VPERMW, which ignores what is above five bits) make bfloat16 numbers of a pair of them, two bytes apart, in
all outputs. `arrange_` puts a row's columns into the order of these pairs (`order`), and sums those of each
scale.

    total += scale (Σ x v − (zero − middle) Σx)           float32

Bytes are two numbers, of their lower five bits and of the upper three, which bfloat16 both has.

v are codes less shift, or less `middle`, half of what codes reach, where there are zeros: neither sum is then
much larger than their difference. Integers of codes are exact; numbers of a codebook are rounded to bfloat16,
as elements are by the reference.
"""
from __future__ import annotations

import struct
from itertools import product

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.quant_gemm import tiles
from tinygrad_nv.quant.types import INT8, UINT8, QType
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec


def takes(spec: QuantGemmSpec, isa: ISA) -> bool:
    """Whether rows are multiplied so."""
    wide = isa.bf16 and isa.lanes == 16 and not isa.emulated
    type = spec.type
    codes = type.bits in (2, 4) or type.element in (INT8, UINT8)
    return wide and not spec.int8 and spec.gemm.a.dtype == dtypes.bfloat16 and codes and not type.mins


def order(type: QType) -> list[int]:
    """Columns of a word, pair after pair."""
    return [4 * i + j + two for j in range(2) for i in range(8 // type.bits) for two in (0, 2)]


def shifts(type: QType) -> list[int]:
    """How far pairs of a word are from the lowest bit of a 16-bit lane."""
    return [8 * j + type.bits * i for j in range(2) for i in range(8 // type.bits)]


def middle(type: QType) -> int:
    """Returns what codes are less, beside the shift."""
    return 1 << type.bits - 1 if type.zeros else 0


def books(type: QType) -> list[tuple[int, list[float]]]:
    """Returns the tables a code is looked up in, whose entries are added: the first of five bits, and numbers
    of all of them."""
    less = type.shift + middle(type)
    if type.bits < 8:
        numbers = type.element.values or [float(code - less) for code in range(1 << type.bits)]
        return [(0, [numbers[i % len(numbers)] for i in range(32)])]
    sign = 256 if tiles.is_signed(type) else 0
    upper = [32 * (i % 8) - less - (sign if i % 8 >= 4 else 0) for i in range(32)]
    return [(0, [float(i) for i in range(32)]), (5, [float(number) for number in upper])]


def functions(spec: QuantGemmSpec) -> str:
    """The functions arrange_, pair_of_ and dots2_, and the tables of `books`."""
    type, a, k = spec.type, spec.gemm.a, spec.gemm.k
    tables = "\n".join(f"static const u16 book{i}_[32] __attribute__((aligned(64))) = "
                       f"{{{', '.join(hex(_bfloat16(number)) for number in numbers)}}};"
                       for i, (_, numbers) in enumerate(books(type)))
    places, many, run = order(type), len(order(type)), tiles.run_of(type, k)
    at = "order[k + i]" if type.permuted else "(k + i)"
    if type.permuted or a.k != 1: read = f"vw x; for (int i = 0; i < {many}; i++) x[i] = p[{at} * {a.k}ll];"
    else: read = "const vw x = *(const vw *)(p + k);"
    total = f"for (int i = 0; i < {many}; i++) sum += one_bf16((const u16 *)&x + i);" if type.zeros else ""
    ends = f"if ((k + {many}) % {run} == 0) {{ *sx++ = sum; sum = 0; }}" if type.zeros else ""
    return f"""
typedef VECTOR(u16, 32) vh32;
typedef VECTOR(u16, {many}) vw __attribute__((aligned(2), may_alias));
{tables}
INLINE vi pair_of_(const u16 *book, vi at) {{
  vi x;
  __asm__("vpermw %2, %1, %0" : "=v"(x) : "v"(at), "v"(*(const vi *)book));
  return x;
}}
INLINE vf dots2_(vf c, vi v, const u16 *x) {{
  __asm__("vdpbf16ps %2%{{1to16%}}, %1, %0" : "+v"(c) : "v"(v), "m"(*(const quad_u *)x));
  return c;
}}
NOINLINE void arrange_(const u16 *restrict p, const s32 *order, u16 *restrict to, float *restrict sx) {{
  float sum = 0;
  for (s64 k = 0; k < {k}; k += {many}) {{
    {read}
    *(vw *)(to + k) = __builtin_shufflevector(x, x, {', '.join(map(str, places))});
    {total} {ends}
  }}
}}"""


def _bfloat16(number: float) -> int:
    """Its bits, to the nearest, ties to even."""
    bits, = struct.unpack("<I", struct.pack("<f", number))
    return int(bits + 0x7fff + (bits >> 16 & 1)) >> 16


def main_loop(spec: QuantGemmSpec, rows: int, chains: int) -> str:
    """C that adds to total0, …"""
    type, k = spec.type, spec.gemm.k
    step, run = tiles.step_of(type), tiles.run_of(type, k)
    sums = {r: [f"s{r}_{c}" for c in range(chains)] for r in range(rows)}
    factors = [f"const vf {name} = {text};" for name, text in tiles.factors(spec).items()]
    if type.zeros: factors.append(f"const vf less = zero - {middle(type)}.f;")
    factors.append(" ".join(f"vf {name} = (vf)0.f;" for each in sums.values() for name in each))
    scaled = []
    for r, each in sums.items():
        less = f" - less * sx[{r * (k // run)} + k / {run}]" if type.zeros else ""
        scaled.append(f"total{r} = fma_({' + '.join(each)}{less}, scale, total{r});")

    def words(at: int) -> str:
        lines, pairs = tiles.loads(spec, step, at), len(order(type)) // 2
        for word in range(step // (2 * pairs)):
            for i, (right, (book, (first, _))) in enumerate(product(shifts(type), enumerate(books(type)))):
                word_, at = f"(vh32)codes{word * pairs // 2}", 2 * (word * pairs + i // len(books(type)))
                lines.append(f"{{ const vi v = pair_of_(book{book}_, (vi)({word_} >> (u16){right + first}));")
                lines += [f"{each[i % chains]} = dots2_({each[i % chains]}, v, x + k + {r * k + at});"
                          for r, each in sums.items()]
                lines.append("}")
        return " ".join(lines)
    before, after = " ".join(factors), " ".join(scaled)
    if run < INT8_BLOCK:
        both = " ".join(f"{{ const s64 k = at + {at}; {before} {words(at)} {after} }}"
                        for at in range(0, INT8_BLOCK, step))
        return f"for (s64 at = 0; at < {k}; at += {INT8_BLOCK}) {{ {both} }}"
    within = f"k < first + {run}" + (f" && k < {k}" if k % run else "")
    return f"""for (s64 first = 0; first < {k}; first += {run}) {{
    const s64 k = first; {before}
    for (s64 k = first; {within}; k += {INT8_BLOCK}) {{ {words(0)} }}
    {after}
  }}"""
