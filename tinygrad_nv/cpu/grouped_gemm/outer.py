"""Sums of outer products of the rows of each group (tile/grouped_gemm/outer.py) on a CPU, in float32.

Protocol: parts share out columns of y, so that all have as much to do whatever the groups are, and no bit
depends on their number.

    for each group e
      for each `CHUNK` columns of y
        those of all rows, widened, `block_n` of a row side by side     in the part's workspace
        for each panel of columns of x
          those of all rows, widened, a row's side by side              in the part's workspace
          for each `block_n` columns of y: sums in registers over all rows, stored once

A group without rows has zeros.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.grouped_gemm.layout import SMALL
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec

CHUNK = 64      # columns of y that are multiplied with a panel of x
VECTORS = 3     # of a panel


@dataclass(frozen=True)
class CPUGroupedOuter(CPUSchedule):
    """Shares of columns of y; `block_n` of them times a panel are summed in registers."""
    block_n: int = 4
    template: ClassVar[str] = "grouped_outer"


def default(spec: GroupedOuterSpec, target: CPU) -> CPUGroupedOuter:
    """The default schedule: as many sums as leave registers for a panel and a factor."""
    block_n = 8 if target.isa.registers == 32 else 4
    parts = 1 if spec.flops < SMALL else min(target.threads, -(-spec.n // block_n))
    return CPUGroupedOuter(target.isa, parts, block_n)


def problems(spec: GroupedOuterSpec, s: CPUGroupedOuter) -> list[str]:
    """Why sums cannot have a schedule; empty when they can."""
    if s.block_n and not CHUNK % s.block_n: return []
    return [f"block_n {s.block_n}, a divisor of {CHUNK} is needed"]


def build(spec: GroupedOuterSpec, s: CPUGroupedOuter) -> CPUKernel:
    """The kernel: out, workspace; y, x, offsets, and the order if there is one."""
    element, panel = c_type(spec.dtype), VECTORS * s.isa.lanes
    own, shares = up(spec.rows * (CHUNK + panel), 16), -(-spec.n // s.block_n)
    body = f"""
  float *const ys = (float *)work + core_id * {own}ll, *const xs = ys + {spec.rows * CHUNK};
  const s64 n0 = {shares}ll * core_id / {s.parts} * {s.block_n};
  const s64 end = {shares}ll * (core_id + 1) / {s.parts} * {s.block_n};
  const s64 n1 = end < {spec.n} ? end : {spec.n};
  for (s64 e = 0; e < {spec.groups}; e++) {{
    const s64 first = offsets[e], rows = offsets[e + 1] - first;
    if (rows <= 0) {{
      {element} *const to = out + e * {spec.n * spec.k}ll;
      for (s64 i = n0 * {spec.k}; i < n1 * {spec.k}; i++) to[i] = 0;
      continue;
    }}
    for (s64 n = n0; n < n1; n += {CHUNK}) {{
      const s64 columns = n1 - n < {CHUNK} ? n1 - n : {CHUNK};
      for (s64 i = 0; i < rows; i++) {{
        const s64 row = first + i;
        factors_(y + {_row(spec.gather_y)} * {spec.n} + n, columns, rows, ys + i * {s.block_n});
      }}
      for (s64 k = 0; k < {spec.k}; k += {panel}) {{
        for (s64 i = 0; i < rows; i++) {{
          const s64 row = first + i;
          __typeof__(x) from = x + {_row(spec.gather_x)} * {spec.k} + k;
          for (s64 v = 0; v < {panel}; v += W)
            store_f32(xs + i * {panel} + v, load_n_{short(spec.dtype)}(from + v, {spec.k} - k - v));
        }}
        for (s64 c = 0; c < columns; c += {s.block_n})
          sums_(ys + c * rows, xs, rows, columns - c, {spec.k} - k,
                out + (e * {spec.n} + n + c) * {spec.k} + k);
      }}
    }}
  }}"""
    inputs = [(element, "y"), (element, "x"), ("s32", "offsets"), *[("s32", "order")] * spec.has_order]
    before = header("gemm.h") + _factors(spec, s) + _sums(spec, s.isa, s.block_n)
    return kernel(f"grouped_outer_{spec.rows}x{spec.n}x{spec.k}", s.isa, body,
                  [(element, "out"), ("u8", "work")], inputs, parts=s.parts,
                  workspace_bytes=4 * s.parts * own, before=before)


def _row(gather: int) -> str: return f"(s64)(order[row] / {gather})" if gather else "row"


def _factors(spec: GroupedOuterSpec, s: CPUGroupedOuter) -> str:
    """The function that widens columns of a row of y, and puts them where the blocks of `rows` rows lie."""
    element, kind = c_type(spec.dtype), short(spec.dtype)
    return f"""
NOINLINE void factors_(const {element} *from, s64 columns, s64 rows, float *to) {{
  float wide[{CHUNK}] __attribute__((aligned(64)));
  for (s64 c = 0; c < {CHUNK}; c += W) store_f32(wide + c, load_n_{kind}(from + c, columns - c));
  for (s64 c = 0; c < columns; c += {s.block_n})
    for (s64 i = 0; i < {s.block_n}; i++) to[c * rows + i] = wide[c + i];
}}"""


def _sums(spec: GroupedOuterSpec, isa: ISA, block_n: int) -> str:
    """The function that sums a block of columns of y times a panel of x, and stores what there is of it."""
    cells = [(c, v) for c in range(block_n) for v in range(VECTORS)]
    kind = short(spec.dtype)
    zeros = " ".join(f"vf s{c}_{v} = (vf)0.f;" for c, v in cells)
    loads = " ".join(f"const vf x{v} = load_f32(xs + {v} * W);" for v in range(VECTORS))
    added = " ".join(f"s{c}_{v} = fma_((vf)ys[{c}], x{v}, s{c}_{v});" for c, v in cells)
    stored = "\n  ".join(
        f"if ({c} < columns) {{ " + " ".join(
            f"store_n_{kind}(out + {c}ll * {spec.k} + {v} * W, s{c}_{v}, left - {v} * W);"
            for v in range(VECTORS)) + " }" for c in range(block_n))
    return f"""
NOINLINE void sums_(const float *ys, const float *xs, s64 rows, s64 columns, s64 left,
                    {c_type(spec.dtype)} *out) {{
  {zeros}
  for (s64 i = 0; i < rows; i++, ys += {block_n}, xs += {VECTORS * isa.lanes}) {{ {loads} {added} }}
  {stored}
}}"""
