"""h Bᵀ of rows that have an adapter each (tile/lora/spec.py): rows of B times numbers, added up.

Protocol: parts share out columns, the same of every adapter; a result is written once.

    for each adapter e that has rows, for each segment, for `CHUNK` of its columns
      for 1, 2 or 4 rows at a time: sums of the chunk in the first cache
        for `TOGETHER` rows r < ranks[e, segment] of B at a time, long streams: sums += h[r] · B[r]
    zeros: rows without an adapter

Sums in registers instead, of 64 columns or fewer, jump from row to row of B: 2 rows of rank 64 by 4096
columns then take 905 µs, and here 495 (one core of an AMD EPYC, AVX2, 20 GB/s).
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.lora.spec import LoraExpandSpec

TOGETHER = 4                # rows of B
CHUNK = 512                 # columns, whose sums stay in the first cache
SHARE = 128                 # columns that parts have multiples of
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
      for (s64 n = begin; n < end; n += {CHUNK}) {{
        const s64 left = end - n < {CHUNK} ? end - n : {CHUNK};
        const {c_type(spec.matrix)} *from = b + e * {spec.rank * spec.columns}ll + n;
        s64 i = first;
        {calls}
      }}
    }}"""


def _rows(spec: LoraExpandSpec, rows: int) -> str:
    """C: `left` columns of so many rows."""
    of_x, of_w, n = short(spec.dtype), short(spec.matrix), spec.columns

    def add_rows(many: int, count: str) -> str:
        """A vector of columns: `many` rows of B onto the sums."""
        load, more = ("load_n_", f", {count}") if count else ("load_", "")
        lines = [f"vf s{i} = load_f32(sums[{i}] + c);" for i in range(rows)]
        for u in range(many):
            if not count: lines.append(f"__builtin_prefetch(b + {(u + many) * n} + c, 0, 2);")
            lines.append(f"const vf b{u} = {load}{of_w}(b + {u * n} + c{more});")
            lines += [f"s{i} = fma_(x{i}_{u}, b{u}, s{i});" for i in range(rows)]
        lines += [f"store_f32(sums[{i}] + c, s{i});" for i in range(rows)]
        return " ".join(lines)

    def step(many: int) -> str:
        x = " ".join(f"const vf x{i}_{u} = (vf)one_{of_x}(h + {i * spec.pitch} + r + {u});"
                     for i in range(rows) for u in range(many))
        return f"""{{
    const {c_type(spec.matrix)} *b = w + r * {n};
    {x}
    s64 c = 0;
    for (; c + W <= left; c += W) {{ {add_rows(many, '')} }}
    if (c < left) {{ {add_rows(many, 'left - c')} }}
  }}"""
    c = c_type(spec.dtype)
    def store_rows(count: str) -> str:
        store = "store_n_" if count else "store_"
        return " ".join(f"{store}{of_x}(out + (s64)order[{i}] * {n} + c, load_f32(sums[{i}] + c){count});"
                        for i in range(rows))
    zeros = " ".join(f"store_f32(sums[{i}] + c, (vf)0.f);" for i in range(rows))
    return f"""
NOINLINE void rows_{rows}(const {c_type(spec.matrix)} *w, const {c} *h, s64 rank, s64 left, {c} *out,
                          const s32 *order) {{
  float sums[{rows}][{CHUNK}];
  for (s64 c = 0; c < left; c += W) {{ {zeros} }}
  s64 r = 0;
  for (; r + {TOGETHER} <= rank; r += {TOGETHER}) {step(TOGETHER)}
  for (; r < rank; r++) {step(1)}
  s64 c = 0;
  for (; c + W <= left; c += W) {{ {store_rows('')} }}
  if (c < left) {{ {store_rows(', left - c')} }}
}}"""
