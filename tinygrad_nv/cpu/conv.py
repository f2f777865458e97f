"""Convolutions as implicit GEMMs (tile/conv/spec.py).

Protocol: the blocked GEMM of cpu/gemm/blocked. A row of its left operand is packed from the image where it
lies: of each tap of the filter the channels of one pixel, side by side, or zeros outside of the image. No
matrix of patches is in memory but the packed block, block_m x block_k, in the second cache.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.gemm.blocked.blocks import STACK_BYTES, blocks, count_parts, in_blocks, words
from tinygrad_nv.cpu.gemm.blocked.kernel import Operands, assemble, pitch, stack_bytes
from tinygrad_nv.cpu.gemm.blocked.pack import packing
from tinygrad_nv.cpu.gemm.layout import PER, kind_of
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import Family


@dataclass(frozen=True)
class ImplicitGemm(CPUGemm):
    """Implicit GEMM of packed patches and filters: `rows` x `columns` sums in registers."""
    template: ClassVar[str] = "implicit_gemm"


def problems(spec: ConvSpec, s: ImplicitGemm) -> list[str]:
    """Why a convolution cannot have a schedule; empty when it can."""
    per, lanes = PER[kind_of(spec.gemm, s.isa)], s.isa.lanes
    needed = (("columns", lanes), ("rows", 1), ("block_m", s.rows), ("block_n", s.columns),
              ("block_k", lanes * per))
    out = [f"{name} {value}, a multiple of {of} is needed" for name, of in needed
           if not (value := getattr(s, name)) or (of and value % of)]
    out = [*expression.problems(spec.epilogue), *out]
    if not out and (need := stack_bytes(spec.gemm, s)) > STACK_BYTES:
        out.append(f"{need} bytes on a stack, at most {STACK_BYTES}")
    return out


def default(spec: ConvSpec, target: CPU) -> ImplicitGemm:
    """The default schedule."""
    gemm = spec.gemm
    made = blocks(gemm, target, PER[kind_of(gemm, target.isa)])
    tiles = -(-gemm.m // made.block_m) * -(-gemm.n // made.block_n)
    return ImplicitGemm(**vars(replace(made, parts=count_parts(gemm, tiles, target))))


def order_schedule(spec: ConvSpec, target: CPU) -> Ordered | None:
    """The schedule of the class (cpu/gemm/blocked/blocks.py); None where the kernel does not take it."""
    made = in_blocks(default(spec, target), spec.gemm, target)
    return None if problems(spec, made) else Ordered(made, words(made))


def build(spec: ConvSpec, s: ImplicitGemm) -> CPUKernel:
    """The kernel: out, x, w, and parameters of the epilogue."""
    gemm, kind, isa = spec.gemm, kind_of(spec.gemm, s.isa), s.isa
    step, deep = pitch(s.block_k, PER[kind], isa), up(s.block_k // PER[kind], isa.lanes)
    functions = [_patches(spec, kind, step), packing("b", gemm.b, kind, s.columns, deep)]
    kh, kw = spec.kernel
    return assemble(f"conv_{spec.outputs}x{kh}x{kw}x{spec.channels}", gemm, s, Operands(
        functions, [(c_type(spec.dtype), "a"), (c_type(spec.dtype), "b")],
        line=16 * PER[kind] * spec.dtype.itemsize,
        pack_a=f"pack_a(a, left, m0, rows, strips * {s.rows}, k0, deep);"))


def _patches(spec: ConvSpec, kind: str, step: int) -> str:
    """The function that packs `most` rows of patches from row m0 on, of which `rows` there are, elements
    [k0, k0 + count) of each."""
    element, name, c = c_type(spec.dtype), short(spec.dtype), spec.channels
    high, wide, (_, kw), (sh, sw) = spec.out_height, spec.out_width, spec.kernel, spec.stride
    unit = "float" if kind == "fma" else element
    if kind == "fma":
        copy = f"""s64 i = 0;
        for (; i + W <= n; i += W) *(vf_u *)(q + i) = load_{name}(p + i);
        for (; i < n; i++) q[i] = ((vf)one_{name}(p + i))[0];"""
    else: copy = "for (s64 i = 0; i < n; i++) q[i] = p[i];"
    return f"""
NOINLINE void pack_a(const {element} *restrict x, u32 *restrict to, s64 m0, s64 rows, s64 most, s64 k0,
                     s64 count) {{
  for (s64 r = 0; r < most; r++) {{
    {unit} *q = ({unit} *)(to + r * {step}), *end = q + (count + {PER[kind] - 1}) / {PER[kind]} * {PER[kind]};
    const s64 row = m0 + r, b = row / {high * wide}, i0 = row / {wide} % {high} * {sh} - {spec.padding[0]},
              j0 = row % {wide} * {sw} - {spec.padding[2]};
    for (s64 k = k0; r < rows && k < k0 + count;) {{
      const s64 tap = k / {c}, i = i0 + tap / {kw}, j = j0 + tap % {kw}, from = k % {c};
      const s64 n = {c} - from < k0 + count - k ? {c} - from : k0 + count - k;
      if (i >= 0 && i < {spec.height} && j >= 0 && j < {spec.width}) {{
        const {element} *p = x + ((b * {spec.height} + i) * {spec.width} + j) * {c} + from;
        {copy}
      }} else for (s64 i = 0; i < n; i++) q[i] = 0;
      q += n; k += n;
    }}
    while (q < end) *q++ = 0;
  }}
}}"""


CONV = template(ConvSpec, ImplicitGemm, default, problems, __name__)
FAMILY = Family("conv", (CONV,), determinism_class=order_schedule)
