"""Rows of activations in C, as matrices in tiles are multiplied with them: in bytes, or in float32.

Protocol: `functions(spec, rows)` is text that defines, in C,

    quantise_(p, order, q, d, sq, start)    a row from p on: bytes q; of each block of 32 columns a scale d;
                                            of each step (tiles.py) the sum of its bytes, sq, and times minus
                                            the shift, start
                                            a block with NaN or infinity has the scale NaN and bytes of 0, so
                                            that the row's results are NaN; one so small that 1 / d overflows
                                            has bytes of 0
    widen_(p, order, to)                    float32, where the spec does not quantise: for codes of fp8
                                            so much larger as columns.py says

`rows` of them lie together, a step of each side by side: q[step][row][column], d[block][row], sq[step][row].
"""
from __future__ import annotations

from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.cpu.quant_gemm import columns, tiles
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec


def functions(spec: QuantGemmSpec, rows: int = 1) -> str:
    """The functions of a spec. Products are not contracted: they are rounded before they are compared with
    halves."""
    a, k, step = spec.gemm.a, spec.gemm.k, tiles.step_of(spec.type)
    kind, element = short(a.dtype), c_type(a.dtype)
    read = f"strided_{kind}(p + k * {a.k}ll, {a.k}, W)" if a.k != 1 else f"load_{kind}(p + k)"
    if spec.type.permuted:
        read = f"({{ vf x; for (int i = 0; i < W; i++) x[i] = one_{kind}(p + order[k + i] * {a.k}ll); x; }})"
    took = f"const {element} *restrict p, const s32 *order"
    text = f"""
INLINE vf columns_({took}, s64 k) {{ return {read}; }}"""
    times = f" * {columns.RAISED}" if columns.is_small(spec.type) else ""
    if not spec.int8: return f"""{text}
NOINLINE void widen_({took}, float *to) {{
  for (s64 k = 0; k < {k}; k += W) store_f32(to + k, columns_(p, order, k){times});
}}"""
    return f"""{LARGEST}{text}
NOINLINE void quantise_({took}, s8 *q, float *d, float *sq, s32 *start) {{
#pragma clang fp contract(off)
  for (s64 k = 0; k < {k}; k += {INT8_BLOCK}) {{
    vf x[{INT8_BLOCK} / W]; vi most = (vi)0;
    for (int v = 0; v < {INT8_BLOCK} / W; v++) {{
      x[v] = columns_(p, order, k + v * W);
      most = __builtin_elementwise_max(as_i(abs_(x[v])), most);  // the bits' order is the numbers', NaN last
    }}
    const union {{ s32 i; float f; }} top = {{largest_(most)}};
    const s32 finite = top.i < 0x7f800000 ? -1 : 0;
    const float scale = top.f / 127.f, inverse = 1.f / scale;
    const float times = inverse <= 0x1.fffffep127f ? inverse : 0.f;
    d[k / {INT8_BLOCK} * {rows}] = finite ? scale : __builtin_nanf("");
    vi sum = (vi)0;
    for (int v = 0; v < {INT8_BLOCK} / W; v++) {{
      const vi whole = (as_i(x[v] * times + NEAREST) - as_i((vf)NEAREST)) & finite;
      store_s8(q + k * {rows} + v * W / {step} * {step * rows} + v * W % {step}, whole);
      sum += whole;
      if ((v + 1) * W % {step} == 0) {{
        const s32 total = sum_i(sum);
        const s64 at = (k + v * W) / {step} * {rows};
        sq[at] = (float)total;
        start[at] = total * -{tiles.shift(spec.type)};
        sum = (vi)0;
      }}
    }}
  }}
}}"""


LARGEST = """
INLINE s32 largest_(vi x) {
#if W == 16
  VECTOR(s32, 8) h = __builtin_elementwise_max(x.lo, x.hi);
  VECTOR(s32, 4) f = __builtin_elementwise_max(h.lo, h.hi);
#elif W == 8
  VECTOR(s32, 4) f = __builtin_elementwise_max(x.lo, x.hi);
#else
  VECTOR(s32, 4) f = x;
#endif
  VECTOR(s32, 2) g = __builtin_elementwise_max(f.lo, f.hi);
  return g.x > g.y ? g.x : g.y;
}"""
