"""Dot products of bytes in C, of codes of a matrix in tiles and of rows of activations.

Protocol: a vector of 32-bit lanes is four columns of as many outputs, without a sign; a row's four columns
are spread over its lanes. Where VPDPBUSD is missing VPMADDUBSW multiplies, and adds products of two columns
in 16 bits: sums of as many of them as fit there are widened at once. Integers are the same everywhere.
"""
from __future__ import annotations

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.quant_gemm import tiles
from tinygrad_nv.quant.types import QType


def functions(isa: ISA) -> str:
    """The functions that products call."""
    return f"{DOTS}{SHORTS if in_shorts(isa) else ''}"


def products(type: QType, isa: ISA, step: int, rows: int, a: str, pitch: int,
             vectors: tuple[str, ...] = ("",)) -> list[str]:
    """C that adds the products of a step to c0, …: of the step's columns `a` of rows `pitch` bytes apart.
    Vectors of outputs are told apart by what is behind names."""
    quads, cells = range(step // 4), [(r, v) for r in range(rows) for v in vectors]
    def of_a(r: int, i: int) -> str: return f"{a} + {r * pitch + 4 * i}"
    if not in_shorts(isa):
        return [f"c{r}{v} = dots_(c{r}{v}, y{i}{v}, {of_a(r, i)});" for i in quads for r, v in cells]
    def spread(r: int, i: int) -> str: return f"(vi)*(const quad_u *)({of_a(r, i)})"
    if has_sign_in_a(type, isa):
        def signs(r: int, v: str, i: int) -> str: return f"turned_({spread(r, i)}, codes{i}{v})"
        out = []
        for i in quads:
            out += [f"const vi size{i}{v} = size_(codes{i}{v});" for v in vectors]
            out += [f"c{r}{v} = four_(c{r}{v}, two_(size{i}{v}, {signs(r, v, i)}));" for r, v in cells]
        return out
    most = 32767 // (2 * 127 * tiles.largest(type))     # sums of two products that 16 bits hold
    if not most:
        return [f"c{r}{v} = four_(c{r}{v}, two_(y{i}{v} & {half}, {spread(r, i)}));"
                for i in quads for r, v in cells for half in ("0x7f7f7f7f", "(s32)0x80808080")]
    out = []
    for first in range(0, len(quads), most):
        some = quads[first:first + most]
        for i in some:
            begin = "shorts {0} = two_(" if i == first else "{0} = more_({0}, "
            out += [f"{begin.format(f'h{first}_{r}{v}')}y{i}{v}, {spread(r, i)});" for r, v in cells]
        out += [f"c{r}{v} = four_(c{r}{v}, h{first}_{r}{v});" for r, v in cells]
    return out


def scale_sum(type: QType, c: str, sq: str) -> str:
    """C of a step's sum c of bytes as a number that a row's scale is multiplied with; sq: the sum of the
    row's bytes."""
    value = f"to_f({c})"
    if type.zeros: value = f"({value} - zero * {sq})"
    value = f"{value} * scale"
    return f"({value} - low * {sq})" if type.mins else value


def in_shorts(isa: ISA) -> bool:
    """Whether bytes are multiplied by VPMADDUBSW."""
    return isa.lanes > 4 and not isa.vnni and not isa.emulated


def has_sign_in_a(type: QType, isa: ISA) -> bool:
    """Whether codes with a sign give it to a, by VPSIGNB, which AVX-512 has not."""
    return in_shorts(isa) and isa.lanes == 8 and tiles.is_signed(type)


# a quad of codes times a quad of a, which all lanes have
DOTS = """
typedef s32 quad_u __attribute__((aligned(1), may_alias));
INLINE vi dots_(vi c, vi codes, const s8 *q) {
#if HAVE_VNNI && AVX512
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(codes), "m"(*(const quad_u *)q));
  return c;
#else
  return dot_quad(c, codes, (vi)*(const quad_u *)q);
#endif
}"""
# the same in 16 bits, two sums of two products
SHORTS = """
typedef VECTOR(s16, 2 * W) shorts;
INLINE shorts two_(vi free, vi with) {
  shorts x;
  __asm__("vpmaddubsw %2, %1, %0" : "=v"(x) : "v"(free), "v"(with));
  return x;
}
// added at once: compilers sum in another order, and keep all products until then
INLINE shorts more_(shorts sum, vi free, vi with) {
  shorts x;
  __asm__("vpmaddubsw %3, %2, %1; vpaddw %1, %0, %0" : "+v"(sum), "=&v"(x) : "v"(free), "v"(with));
  return sum;
}
INLINE vi four_(vi sum, shorts x) {
  __asm__("vpmaddwd %2, %1, %1; vpaddd %1, %0, %0" : "+v"(sum), "+v"(x) : "v"((vi)0x00010001));
  return sum;
}
#if !AVX512
INLINE vi size_(vi x) { __asm__("vpabsb %1, %0" : "=v"(x) : "v"(x)); return x; }
INLINE vi turned_(vi q, vi x) { __asm__("vpsignb %2, %1, %0" : "=x"(q) : "x"(q), "x"(x)); return q; }
#endif"""
