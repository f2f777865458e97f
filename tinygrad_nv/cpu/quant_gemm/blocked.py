"""Many rows times a quantised matrix: a blocked GEMM (cpu/gemm/blocked) whose panels are dequantised.

Protocol: a panel's elements are decoded (decode.py), W outputs of W units at a time, and transposed in
registers: once for each block of rows. They are float32, or bfloat16 in pairs where a is and the processor
multiplies those: rounded once, as the reference does. Of a permuted matrix a is packed in the order of its
columns.
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.gemm.blocked.blocks import STACK_BYTES, blocks, count_parts
from tinygrad_nv.cpu.gemm.blocked.kernel import Operands, assemble, pitch, stack_bytes
from tinygrad_nv.cpu.gemm.blocked.pack import packing
from tinygrad_nv.cpu.gemm.layout import PER, kind_of
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, up
from tinygrad_nv.cpu.quant_gemm import decode
from tinygrad_nv.cpu.quant_gemm.schedules import QuantGemm
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec


def problems(spec: QuantGemmSpec, s: QuantGemm) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    per, lanes = PER[kind_of(spec.gemm, s.isa)], s.isa.lanes
    needed = (("columns", lanes), ("rows", 1), ("block_m", s.rows), ("block_n", s.columns),
              ("block_k", lanes * per))
    out = [f"{name} {value}, a multiple of {of} is needed" for name, of in needed
           if not (value := getattr(s, name)) or (of and value % of)]
    out = [*decode.untaken(spec), *expression.problems(spec.gemm.epilogue), *out]
    if not out and (need := stack_bytes(spec.gemm, s)) > STACK_BYTES:
        out.append(f"{need} bytes on a stack, at most {STACK_BYTES}")
    return out


def default(spec: QuantGemmSpec, target: CPU) -> QuantGemm:
    """The default schedule."""
    gemm = spec.gemm
    made = blocks(gemm, target, PER[kind_of(gemm, target.isa)])
    tiles = -(-gemm.m // made.block_m) * -(-gemm.n // made.block_n)
    return QuantGemm(**vars(replace(made, parts=count_parts(gemm, tiles, target))))


def build(spec: QuantGemmSpec, schedule: QuantGemm) -> CPUKernel:
    """The kernel."""
    gemm, (n, k), isa = spec.gemm, spec.shape, schedule.isa
    kind = kind_of(gemm, isa)
    step = pitch(schedule.block_k, PER[kind], isa)
    deep = up(schedule.block_k // PER[kind], isa.lanes)
    functions = [decode.functions(spec.type, n, k, isa.lanes), _panel(kind, schedule.columns, deep)]
    at = f"a + {gemm.a.offset} + m0 * {gemm.a.mn}ll"
    if spec.type.permuted:
        functions.append(_gather_rows(spec, kind, step))
        pack_a = f"pack_a({at}, order + k0, left, rows, strips * {schedule.rows}, deep);"
    else:
        functions.append(packing("a", gemm.a, kind, step))
        pack_a = f"pack_a({at} + k0 * {gemm.a.k}ll, left, rows, strips * {schedule.rows}, deep);"
    pack_b = f"{decode.declare_matrix(spec.buffers)} pack_b(w, right, p * {gemm.n} + n0 + j, k0, most, deep);"
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.buffers)]
    return assemble(f"quant_gemm_{gemm.m}x{gemm.n}x{gemm.k}", gemm, schedule,
                     Operands(functions, inputs, pack_a=pack_a, pack_b=pack_b))


def _panel(kind: str, columns: int, deep: int) -> str:
    """The function that dequantises `rows` outputs from n on, `count` columns from k on, into panels."""
    per = PER[kind]
    if kind == "fma": whole, some = "as_i(weights_(w, row, at))", "as_i(weights_n_(w, row, at, left))"
    else:
        whole = "pairs_(weights_(w, row, at), weights_(w, row, at + W))"
        more = "left > W ? weights_n_(w, row, at + W, left - W) : (vf)0.f"  # no scale lies behind the last
        some = f"pairs_(weights_n_(w, row, at, left), {more})"
    return f"""{PAIRS if kind == 'pair' else ''}
NOINLINE void pack_b(matrix w, u32 *restrict to, s64 n, s64 k, s64 rows, s64 count) {{
  for (s64 r = 0; r < rows; r += W) {{
    u32 *panel = to + r / {columns} * {columns * deep} + r % {columns};
    for (s64 u = 0; u * {per} < count; u += W) {{
      const s64 at = k + u * {per}, left = count - u * {per};
      vi x[W];
      if (left >= {per} * W && r + W <= rows) {{
#pragma clang loop unroll_count(4)
        for (int i = 0; i < W; i++) {{ const s64 row = n + r + i; x[i] = {whole}; }}
      }} else for (int i = 0; i < W; i++) {{
        const s64 row = n + r + i;
        x[i] = r + i < rows ? {some} : (vi)0;
      }}
      transpose(x);
#pragma clang loop unroll(full)
      for (int i = 0; i < W; i++) *(vi_u *)(panel + (u + i) * {columns}) = x[i];
    }}
  }}
}}"""


# two vectors of float32 as pairs of bfloat16 along k
PAIRS = """
INLINE vi pairs_(vf low, vf high) {
#if HAVE_BF16
  vi x;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(x) : "v"(low), "v"(high));
  return x;
#else
  VECTOR(u16, 2 * W) x;
  x.lo = narrow_bf16(low); x.hi = narrow_bf16(high);
  return (vi)x;
#endif
}"""


def _gather_rows(spec: QuantGemmSpec, kind: str, step: int) -> str:
    """The function that packs a in the order of the matrix's columns, an element at a time."""
    a, per = spec.gemm.a, PER[kind]
    element, name = c_type(a.dtype), short(a.dtype)
    one = f"as_u((vf)one_{name}(q))[0]" if kind == "fma" else "(u32)*q << 16 * i"
    return f"""
NOINLINE void pack_a(const {element} *restrict p, const s32 *order, u32 *restrict to, s64 rows, s64 most,
                     s64 count) {{
  for (s64 r = 0; r < most; r++) for (s64 u = 0; u * {per} < count; u++) {{
    u32 x = 0;
    for (s64 i = 0; i < {per} && u * {per} + i < count && r < rows; i++) {{
      const {element} *q = p + r * {a.mn}ll + order[u * {per} + i] * {a.k}ll;
      x |= {one};
    }}
    to[r * {step} + u] = x;
  }}
}}"""
