"""x Aᵀ of rows that have an adapter each (tile/lora/spec.py): dot products along k.

Protocol: parts share out the columns that an adapter has, `TOGETHER` at a time, the same of every adapter.

    for each adapter e that has rows, for `BLOCK` of them, for each segment
      for `TOGETHER` columns below ranks[e, segment]: long streams of A, read once for the block
        one or two rows at a time: sums in registers, lanes of k; the next columns are fetched meanwhile
    zeros: columns from the rank on, and rows without an adapter
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.lora.spec import LoraShrinkSpec

TOGETHER = 4                # columns
LINE = 64                   # bytes
BLOCK = 32                  # rows, which stay in the second cache while columns follow each other
BYTES_OF_PART = 64 << 10    # of A: waking a thread takes as long as reading so much
PARTS = 4                   # for each thread, so that a thread that is late does fewer


class CPULoraShrink(CPUSchedule):
    """Shares of columns."""
    template: ClassVar[str] = "lora_shrink"


def default(spec: LoraShrinkSpec, target: CPU) -> CPULoraShrink:
    """Some parts for each thread, where the matrices are worth waking them."""
    most = PARTS * target.threads if target.threads > 1 else 1
    shares = -(-spec.rank // TOGETHER)
    return CPULoraShrink(target.isa, max(1, min(most, shares, spec.active_bytes // BYTES_OF_PART)))


def build(spec: LoraShrinkSpec, s: CPULoraShrink) -> CPUKernel:
    """The kernel: h; x, a, ranks, offsets, order."""
    c, w, n, rank = c_type(spec.dtype), c_type(spec.matrix), spec.columns, spec.rank
    body = f"""
  for (s64 e = 0; e < {spec.adapters}; e++) for (s64 i0 = offsets[e]; i0 < offsets[e + 1]; i0 += {BLOCK}) {{
    const s64 i1 = i0 + {BLOCK} < offsets[e + 1] ? i0 + {BLOCK} : offsets[e + 1];
    for (s64 part = 0; part < {spec.parts}; part++) {{
      const s64 rank = ranks[e * {spec.parts} + part], shares = (rank + {TOGETHER - 1}) / {TOGETHER};
      const s64 first = shares * core_id / {s.parts} * {TOGETHER};
      const s64 after = shares * (core_id + 1) / {s.parts} * {TOGETHER};
      const s64 last = core_id == {s.parts - 1} ? {rank} : after;
      for (s64 r = first; r < last; r += {TOGETHER}) {{
        const s64 left = rank - r;
        const {w} *from = a + ((e * {spec.parts} + part) * {rank} + r) * {spec.k};
        {c} *to = out + part * {rank} + r;
        const s64 count = {rank} - r < {TOGETHER} ? {rank} - r : {TOGETHER};
        for (s64 i = i0; i < i1; i += 2) {{
          const {c} *x0 = x + (s64)order[i] * {spec.k};
          const {c} *x1 = x + (s64)order[i + 1 < i1 ? i + 1 : i] * {spec.k};
          float sums[{2 * TOGETHER}] = {{0}};
          if (left < {TOGETHER})
            for (s64 u = 0; u < left; u++) dots_2x1(from + u * {spec.k}, x0, x1, sums + u);
          else if (x0 == x1) dots_1x{TOGETHER}(from, x0, x0, sums);
          else dots_2x{TOGETHER}(from, x0, x1, sums);
          for (s64 u = 0; u < count; u++) put_(to + i * {n} + u, sums[u]);
          if (i + 1 < i1) for (s64 u = 0; u < count; u++) put_(to + (i + 1) * {n} + u, sums[{TOGETHER} + u]);
        }}
      }}
    }}
  }}
  if (core_id == {s.parts - 1})
    for (s64 i = offsets[{spec.adapters}] * {n}ll; i < {spec.rows * n}; i++) out[i] = 0;"""
    put = f"INLINE void put_({c} *to, float x) {{ store_n_{short(spec.dtype)}(to, (vf)x, 1); }}"
    if short(spec.dtype) == "f32": put = "INLINE void put_(float *to, float x) { *to = x; }"
    dots = [_dots(spec, *shape, s.isa.lanes) for shape in ((2, 1), (1, TOGETHER), (2, TOGETHER))]
    before = "\n".join([header("gemm.h"), put, "ANYWHERE(vf4_u, vf4);", *dots])
    return kernel(f"lora_shrink_{spec.rows}x{n}x{spec.k}", s.isa, body, [(c, "out")],
                  [(c, "x"), (w, "a"), ("s32", "ranks"), ("s32", "offsets"), ("s32", "order")], parts=s.parts,
                  before=before)


def _dots(spec: LoraShrinkSpec, rows: int, many: int, lanes: int) -> str:
    """C: sums of one or two rows with `many` columns of A; those of the second row from `TOGETHER` on."""
    k, of_x, of_w, size = spec.k, short(spec.dtype), short(spec.matrix), spec.matrix.itemsize
    line = max(1, LINE // (lanes * size))       # vectors

    def inner(at: int, left: int) -> str:
        """A vector, `at` lanes after k, or the last lanes."""
        load, count = ("load_n_", f", {left}") if left else ("load_", "")
        lines = [f"const vf y{i} = {load}{of_x}(x{i} + k + {at}{count});" for i in range(rows)]
        for u in range(many):
            if not left and not at: lines.append(f"__builtin_prefetch(w + {(u + many) * k} + k, 0, 2);")
            lines.append(f"const vf v{u} = {load}{of_w}(w + {u * k + at} + k{count});")
            lines += [f"s{u}_{i} = fma_(v{u}, y{i}, s{u}_{i});" for i in range(rows)]
        return f"{{ {' '.join(lines)} }}"
    names = [(u, i) for u in range(many) for i in range(rows)]
    steps, whole = [], 0
    for vectors in dict.fromkeys((line, 1)):
        end = k // (lanes * vectors) * lanes * vectors
        body = " ".join(inner(at * lanes, 0) for at in range(vectors))
        if whole < end: steps.append(f"for (s64 k = {whole}; k < {end}; k += {vectors} * W) {{ {body} }}")
        whole = end
    if whole < k: steps.append(f"{{ const s64 k = {whole}; {inner(0, k - whole)} }}")
    c, loops = c_type(spec.dtype), "\n  ".join(steps)
    if many == TOGETHER:
        ends = [f"*(vf4_u *)(to + {i * many}) = sum4_({', '.join(f's{u}_{i}' for u in range(many))});"
                for i in range(rows)]
    else: ends = [f"to[{i * TOGETHER + u}] = sum_(s{u}_{i});" for u, i in names]
    return f"""
NOINLINE void dots_{rows}x{many}(const {c_type(spec.matrix)} *w, const {c} *x0, const {c} *x1, float *to) {{
  vf {', '.join(f's{u}_{i} = (vf)0.f' for u, i in names)};
  {loops}
  {' '.join(ends)}
}}"""
