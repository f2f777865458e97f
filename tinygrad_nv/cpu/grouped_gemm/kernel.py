"""Matmuls of rows with the matrix of their group (tile/grouped_gemm/spec.py) on a CPU, in one kernel.

Protocol: parts share out columns, the same of every group's matrix, so that all have as much to do whatever
the routing is, and no bit depends on their number.

    for each group e that has rows
      up to `few` of them: dot products along k          few.py
      more: blocks in registers or AMX tiles           panels.py

Matrices of groups without rows are not read. Rows that no group has become zeros.
"""
from __future__ import annotations

from tinygrad_nv.cpu.grouped_gemm import few, panels
from tinygrad_nv.cpu.grouped_gemm.epilogue import finish, operands, pointers, source
from tinygrad_nv.cpu.grouped_gemm.layout import CPUGrouped, Layout
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec


def build(spec: GroupedGemmSpec, s: CPUGrouped) -> CPUKernel:
    """The kernel: out, workspace; x, w, offsets, and those there are of order, weights, bias."""
    l = Layout(spec, s.isa)
    own, inputs = up(l.own_bytes(s.block_m), 64), pointers(spec)
    body = f"""
  const operands p = {{{', '.join(['out', *(name for _, name in inputs)])}}};
  const s64 n0 = {l.shares}ll * core_id / {s.parts} * {l.step};
  const s64 end = {l.shares}ll * (core_id + 1) / {s.parts} * {l.step};
  const s64 n1 = end < {spec.columns} ? end : {spec.columns};
  {'tiles_begin();' if l.by_tiles else ''}
  for (s64 e = 0; e < {spec.groups}; e++) {{
    const s64 first = offsets[e], last = offsets[e + 1];
    if (last - first > {l.few}) many_(&p, e, first, last, n0, n1, (u8 *)work + core_id * {own}ll);
    else if (last > first) few_(&p, e, first, last - first, n0, n1);
  }}
  {'tiles_end();' if l.by_tiles else ''}
  for (s64 i = 0; i < {spec.rows}; i++) {{
    if (i >= offsets[0] && i < offsets[{spec.groups}]) {{ i = offsets[{spec.groups}] - 1ll; continue; }}
    {c_type(spec.dtype)} *to = out + (s64)({'order[i]' if spec.scatter else 'i'}) * {spec.columns};
    for (s64 n = n0; n < n1; n++) to[n] = 0;
  }}"""
    before = [header("gemm.h"), *[header("amx.h")] * l.by_tiles, operands(spec), source(spec), finish(spec),
              few.functions(l), panels.functions(l, s.block_m)]
    return kernel(f"grouped_gemm_{spec.rows}x{spec.n}x{spec.k}", s.isa, body,
                  [(c_type(spec.dtype), "out"), ("u8", "work")], inputs, parts=s.parts,
                  workspace_bytes=s.parts * own, before="\n".join(before))
