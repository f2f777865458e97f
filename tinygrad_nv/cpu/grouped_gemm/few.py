"""Groups of few rows: dot products along k, of a matrix that is read once, as it lies.

Protocol: `functions` makes the C function

    few_(p, e, first, rows, n0, n1)    columns n0 … n1 of rows first … first + rows of group e

    for each `CHUNK` columns
      for `STREAMS` columns at a time, far from each other, of gate and of up
        for up to `together` rows at a time: sums in registers, lanes of k
      epilogue of the chunk's sums, a vector of columns at a time

Memory is read as so many long streams (cpu/gemm/gemv/main_loop.py). Rows after the first `together` find the
columns in the L1 cache.
"""
from __future__ import annotations

from tinygrad_nv.cpu.grouped_gemm.layout import FEW, Layout
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.tile.expression import short

CHUNK = 64              # columns
STREAMS = 4             # of gate and up together


def functions(l: Layout) -> str:
    """The function, and those it calls."""
    together = 4 if l.isa.registers == 32 else 2
    streams = STREAMS // l.spec.halves
    dots = [_dots(l, rows, many) for rows in range(1, together + 1) for many in (1, streams)]
    return "\n".join([*dots, _few(l, together, streams)])


def _dots(l: Layout, rows: int, streams: int) -> str:
    """The function of `streams` columns of each half, `apart` from each other, and `rows` rows."""
    spec, pairs, c, of_w = l.spec, _pairs(l), c_type(l.spec.dtype), c_type(l.spec.matrix)
    step, vector = (2 * l.isa.lanes, "vi") if pairs else (l.isa.lanes, "vf")
    name, name_w = ("pairs", "pairs") if pairs else (short(spec.dtype), short(spec.matrix))
    cells = [(h, r) for h in range(spec.halves) for r in range(streams)]
    lines = [f"const {of_w} *w{h}_{r} = w + {h * spec.columns * spec.k}ll + {r} * apart * {spec.k};"
             for h, r in cells]
    lines += [f"const {c} *x{i} = x[{i}];" for i in range(rows)]
    lines += [f"vf s{h}_{r}_{i} = (vf)0.f;" for h, r in cells for i in range(rows)]

    def inner(left: int) -> str:
        load, count = ("load_n_", f", {left}") if left else ("load_", "")
        out = [f"const {vector} y{i} = {load}{name}(x{i} + k{count});" for i in range(rows)]
        for h, r in cells:
            out.append(f"const {vector} v{h}_{r} = {load}{name_w}(w{h}_{r} + k{count});")
            for s, y in ((f"s{h}_{r}_{i}", f"y{i}") for i in range(rows)):
                out.append(f"{s} = dot_pairs({s}, v{h}_{r}, {y});" if pairs else
                           f"{s} = fma_(v{h}_{r}, {y}, {s});")
        return " ".join(out)
    whole = spec.k // step * step
    if whole: lines.append(f"for (s64 k = 0; k < {whole}; k += {step}) {{ {inner(0)} }}")
    if whole < spec.k: lines.append(f"{{ const s64 k = {whole}; {inner(spec.k - whole)} }}")
    lines += [f"to[{(h * FEW + i) * CHUNK} + {r} * apart] = sum_(s{h}_{r}_{i});"
              for h, r in cells for i in range(rows)]
    body = "\n  ".join(lines)
    return f"""
NOINLINE void dots_{streams}_{rows}(const {of_w} *w, const {c} *const *x, s64 apart, float *to) {{
  {body}
}}"""


def _pairs(l: Layout) -> bool: return l.kind == "pair" and not l.isa.emulated


def _few(l: Layout, together: int, streams: int) -> str:
    spec, element, of_w = l.spec, c_type(l.spec.dtype), c_type(l.spec.matrix)

    def call_dots(many: int, apart: str) -> str:
        given = f"(from, x + i, {apart}, sums + i * {CHUNK} + c);"
        cases = " ".join(f"case {rows}: dots_{many}_{rows}{given} break;" for rows in range(1, together))
        return f"""for (s64 i = 0; i < rows; i += {together}) switch (rows - i) {{
        {cases}
        default: dots_{many}_{together}{given}
      }}"""
    vectors = ", ".join(f"load_f32(sums + {h * FEW * CHUNK} + i * {CHUNK} + c)" for h in range(spec.halves))
    return f"""
NOINLINE void few_(const operands *p, s64 e, s64 first, s64 rows, s64 n0, s64 n1) {{
  float sums[{spec.halves * FEW * CHUNK}] __attribute__((aligned(64)));
  const {element} *x[{FEW}];
  for (s64 i = 0; i < rows; i++) x[i] = source_(p, first + i);
  for (s64 n = n0; n < n1; n += {CHUNK}) {{
    const s64 count = n1 - n < {CHUNK} ? n1 - n : {CHUNK}, apart = count / {streams};
    const {of_w} *w = p->w + (e * {spec.n} + n) * {spec.k};
    for (s64 c = 0; c < apart; c++) {{
      const {of_w} *from = w + c * {spec.k};
      {call_dots(streams, 'apart')}
    }}
    for (s64 c = apart * {streams}; c < count; c++) {{
      const {of_w} *from = w + c * {spec.k};
      {call_dots(1, '0')}
    }}
    for (s64 i = 0; i < rows; i++) for (s64 c = 0; c < count; c += W)
      finish_(p, e, first + i, n + c, count - c, {vectors});
  }}
}}"""
