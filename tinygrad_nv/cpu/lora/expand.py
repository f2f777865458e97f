"""h Bᵀ of rows that have an adapter each (tile/lora/spec.py): rows of B times numbers, added up.

Protocol: parts share out columns, the same of every adapter; a result is written once.

    for each adapter e that has rows, for each segment, `COLUMNS` vectors of columns at a time
      for 1, 2 or 4 rows at a time: sums in registers; for each r < ranks[e, segment]: sum += h[r] · B[r]
    zeros: rows without an adapter
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.lora.spec import LoraExpandSpec

COLUMNS = 8                 # vectors: with `rows` rows, 8 / rows of them are summed at a time
SHARE = 16 * COLUMNS        # columns that parts have multiples of, with the widest vectors
BYTES_OF_PART = 64 << 10    # of B, as of A
PARTS = 4                   # for each thread
ROWS = (1, 2, 4)


class CPULoraExpand(CPUSchedule):
    """Shares of columns."""
    template: ClassVar[str] = "lora_expand"


def default(spec: LoraExpandSpec, target: CPU) -> CPULoraExpand:
    """Some parts for each thread, where the matrices are worth waking them."""
    most = PARTS * target.threads if target.threads > 1 else 1
    shares = -(-spec.columns // SHARE)
    return CPULoraExpand(target.isa, max(1, min(most, shares, spec.active_bytes // BYTES_OF_PART)))


def build(spec: LoraExpandSpec, s: CPULoraExpand) -> CPUKernel:
    """The kernel: out; h, b, ranks, offsets, order."""
    c, n, shares = c_type(spec.dtype), spec.columns, -(-spec.columns // SHARE)
    segments = "\n".join(_segment(spec, part, *span) for part, span in enumerate(spec.spans))
    body = f"""
  const s64 n0 = {shares}ll * core_id / {s.parts} * {SHARE};
  const s64 share = {shares}ll * (core_id + 1) / {s.parts} * {SHARE}, n1 = share < {n} ? share : {n};
  for (s64 e = 0; e < {spec.adapters}; e++) {{
    const s64 first = offsets[e], last = offsets[e + 1];
    if (last == first) continue;
    {segments}
  }}
  for (s64 i = offsets[{spec.adapters}]; i < {spec.rows}; i++)
    for (s64 n = n0; n < n1; n++) out[(s64)order[i] * {n} + n] = 0;"""
    before = "\n".join([header("gemm.h"), *(_rows(spec, rows) for rows in ROWS)])
    return kernel(f"lora_expand_{spec.rows}x{n}x{spec.rank}", s.isa, body, [(c, "out")],
                  [(c, "h"), (c_type(spec.matrix), "b"), ("s32", "ranks"), ("s32", "offsets"),
                   ("s32", "order")], parts=s.parts, before=before)


def _segment(spec: LoraExpandSpec, part: int, begin: int, end: int) -> str:
    """C: the columns of a segment in all rows of an adapter."""
    calls = "\n        ".join(
        f"for (; i + {rows} <= last; i += {rows}) "
        f"rows_{rows}(from, h + i * {spec.pitch} + {part * spec.rank}, rank, left, out + n, order + i);"
        for rows in ROWS[::-1])
    return f"""{{
      const s64 rank = ranks[e * {len(spec.segments)} + {part}];
      const s64 begin = n0 > {begin} ? n0 : {begin}, end = n1 < {end} ? n1 : {end};
      for (s64 n = begin; n < end; n += {COLUMNS} * W) {{
        const s64 left = end - n < {COLUMNS} * W ? end - n : {COLUMNS} * W;
        const {c_type(spec.matrix)} *from = b + e * {spec.rank * spec.columns}ll + n;
        s64 i = first;
        {calls}
      }}
    }}"""


def _rows(spec: LoraExpandSpec, rows: int) -> str:
    """C: `left` columns of so many rows."""
    of_x, of_w, n = short(spec.dtype), short(spec.matrix), spec.columns

    def summed(vectors: int, left: str) -> str:
        load, store, count = ("load_n_", "store_n_", f", {left}") if left else ("load_", "store_", "")
        cells = [(i, v) for i in range(rows) for v in range(vectors)]
        loads = " ".join(f"const vf b{v} = {load}{of_w}(w + r * {n} + c + {v} * W{count});"
                         for v in range(vectors))
        x = " ".join(f"const vf x{i} = (vf)one_{of_x}(h + {i * spec.pitch} + r);" for i in range(rows))
        sums = " ".join(f"s{i}_{v} = fma_(x{i}, b{v}, s{i}_{v});" for i, v in cells)
        stores = " ".join(f"{store}{of_x}(to{i} + c + {v} * W, s{i}_{v}{count});" for i, v in cells)
        return f"""vf {', '.join(f's{i}_{v} = (vf)0.f' for i, v in cells)};
    for (s64 r = 0; r < rank; r++) {{ {loads} {x} {sums} }}
    {stores}"""
    c, vectors = c_type(spec.dtype), COLUMNS // rows
    places = " ".join(f"{c} *to{i} = out + (s64)order[{i}] * {n};" for i in range(rows))
    whole = "" if vectors == 1 else f"""
  for (; c + {vectors} * W <= left; c += {vectors} * W) {{
    {summed(vectors, '')}
  }}"""
    return f"""
NOINLINE void rows_{rows}(const {c_type(spec.matrix)} *w, const {c} *h, s64 rank, s64 left, {c} *out,
                          const s32 *order) {{
  {places}
  s64 c = 0;{whole}
  for (; c < left; c += W) {{
    {summed(1, 'left - c')}
  }}
}}"""
