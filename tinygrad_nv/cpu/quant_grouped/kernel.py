"""Matmuls of rows with the quantised matrix of their group (tile/quant_grouped/spec.py) on a CPU, in one
kernel.

Protocol: loops over a matrix in tiles are those of cpu/quant_gemm, over its rows and its results those of
cpu/grouped_gemm.

    for each group that has rows, `block_m` of them at a time
      bring them: bytes and scales, float32 numbers, or pairs of bfloat16; units where they are many
      for each tile of 16 columns of a part, of gate and of up
        sums = rows · tile                few: dot products, quant_gemm/dots.py; many: quant_gemm/panels.py,
                                          in bytes quant_gemm/byte_panels.py
        epilogue: bias, activation, weight, place

A row that the group before had alone, too, is not brought again: a token's experts, while it is decoded, have
it one after the other. Matrices of groups without rows are not read.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.layout import PER
from tinygrad_nv.cpu.grouped_gemm import epilogue
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.quant_gemm import byte_dots, byte_panels, columns, decode, dots, panels, tiles
from tinygrad_nv.cpu.quant_gemm.schedules import QuantPanels
from tinygrad_nv.cpu.quant_grouped.layout import CPUQuantGrouped, Layout
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec

MATRIX_ORDER = "columns"    # the pointer to orders of columns; `order` is that of rows


def build(spec: QuantGroupedSpec, s: CPUQuantGrouped) -> CPUKernel:
    """The kernel: out, workspace; x, the stack's buffers, offsets, then those there are of order, weights,
    bias."""
    l, one = Layout(spec, s.isa), spec.grouped
    own, rest = l.own_bytes(s.block_m), [each for each in epilogue.pointers(one)[1:] if each[1] != "w"]
    inputs = [("x", c_type(one.dtype)), *((MATRIX_ORDER if name == "order" else name, kind)
                                          for kind, name in decode.pointers(spec.buffers)),
              *((name, kind) for kind, name in rest)]
    body = f"""
  const operands p = {{{', '.join(['out', 'x', *(name for _, name in rest)])}}};
  const matrix w = {{{', '.join(MATRIX_ORDER if name == 'order' else name for name in spec.buffers)}}};
  u8 *const own = (u8 *)work + core_id * {own}ll;
  const s64 t0 = {l.across}ll * core_id / {s.parts}, t1 = {l.across}ll * (core_id + 1) / {s.parts};
  const {c_type(one.dtype)} *before = 0;
  {'tiles_begin();' if l.by_tiles else ''}
  for (s64 e = 0; e < {one.groups}; e++)
    for (s64 i0 = offsets[e]; i0 < offsets[e + 1]; i0 += {s.block_m}) {{
      const s64 rows = offsets[e + 1] - i0 < {s.block_m} ? offsets[e + 1] - i0 : {s.block_m};
      {f'if (rows > {l.few}) {{ many_(&p, w, e, i0, rows, t0, t1, own); before = 0; continue; }}'
       if l.few else ''}
      const int again = rows == 1 && before == source_(&p, i0);
      few_(&p, w, e, i0, rows, t0, t1, own, again);
      before = rows == 1 ? source_(&p, i0) : 0;
    }}
  {'tiles_end();' if l.by_tiles else ''}"""
    return kernel(f"quant_grouped_{one.rows}x{one.n}x{one.k}", s.isa, body,
                  [(c_type(one.dtype), "out"), ("u8", "work")], [(kind, name) for name, kind in inputs],
                  parts=s.parts, workspace_bytes=s.parts * own, before="\n".join(_functions(l, s)))


def _functions(l: Layout, s: CPUQuantGrouped) -> list[str]:
    spec, matrix, one = l.spec, l.matrix, l.spec.grouped
    shared = [header("gemm.h"), decode.struct(spec.buffers), epilogue.operands(one, matrices=False),
              epilogue.source(one), epilogue.finish(one), byte_dots.functions(l.isa),
              tiles.functions(spec.type)]
    heights = dots.heights(s.rows)
    few = [*dots.row_functions(matrix, l.isa), *(dots.main_loop(matrix, l.isa, each) for each in heights),
           *([byte_panels.functions(matrix, l.isa)] if l.byte_panels else []), _few(l, s, heights)]
    if not l.few: return shared + few
    strips = QuantPanels(l.isa, 1, s.block_m, l.strip)
    # rows of pairs have no functions of columns yet
    many = [columns.functions(spec.type, l.isa) if l.pairs else "", panels.PAIR if l.kind == "pair" else "",
            panels.unpack(matrix, l.isa, l.kind),
            *([header("amx.h"), panels.tiles_micro(l.pitch)] if l.by_tiles else
              [panels.micro(l.kind, strips, l.pitch)]), _many(l, s)]
    return shared + few + many


def _order(l: Layout, half: str) -> str:
    """C of the order of a matrix's columns."""
    return f"w.order + (e * {l.spec.grouped.halves} + {half}) * {l.spec.grouped.k}ll"


def _finish_tile(l: Layout) -> str:
    """C that finishes the sums of a tile."""
    made = ", ".join(f"load_f32(sums[{h}][i] + j)" for h in range(l.spec.grouped.halves))
    return f"""const s64 n0 = t * {TILE}, left = {l.spec.grouped.columns} - n0;
    for (s64 i = 0; i < rows; i++) for (s64 j = 0; j < {TILE} && j < left; j += W)
      finish_(p, e, i0 + i, n0 + j, left - j, {made});"""


# **** few rows ****

def _few(l: Layout, s: CPUQuantGrouped, heights: list[int]) -> str:
    """The function of a block of few rows."""
    one, given = l.spec.grouped, dots.of_rows(l.matrix, l.isa)
    calls = " ".join(f"for (; i + {each} <= rows; i += {each}) "
                     f"dots_{each}(w, of, lane, {given}, sums[h][i] + lane);" for each in heights)
    many = f"if (rows >= {byte_panels.FEWEST_ROWS}) panels_(w, of, rows, q, d, sq, start, sums[h]); else " \
        if l.byte_panels else ""
    return f"""
NOINLINE void few_(const operands *p, matrix w, s64 e, s64 i0, s64 rows, s64 t0, s64 t1, u8 *own,
                   int again) {{
  float (*sums)[{s.block_m}][{TILE}] = (float (*)[{s.block_m}][{TILE}])own;
  float *const brought = (float *)(sums + {one.halves});
  if (!again) for (s64 h = 0; h < {l.copies}; h++) {{
    {_pointers(l, s)}
    for (s64 i = 0; i < rows; i++) {{ {_load_row(l)} }}
  }}
  for (s64 t = t0; t < t1; t++) {{
    for (s64 h = 0; h < {one.halves}; h++) {{
      const s64 of = (e * {one.halves} + h) * {l.across} + t;
      {_pointers(l, s)}
      {many}for (s64 lane = 0; lane < {TILE}; lane += W) {{ s64 i = 0; {calls} }}
    }}
    {_finish_tile(l)}
  }}
}}"""


def _pointers(l: Layout, s: CPUQuantGrouped) -> str:
    """C that declares where the rows of half h lie."""
    k, m, type = l.spec.grouped.k, s.block_m, l.spec.type
    copy = f" + h * {m * l.row_bytes // 4}" if l.copies > 1 else ""
    out = f"float *const d = brought{copy};"
    if l.spec.int8:
        steps, blocks = k // tiles.step_of(type), k // INT8_BLOCK
        return (f"{out} float *const sq = d + {m * blocks}; s32 *const start = (s32 *)(sq + {m * steps}); "
                f"s8 *const q = (s8 *)(start + {m * steps});")
    return f"{out} u16 *const x = (u16 *)(d + {m * (k // tiles.run_of(type, k))});" if l.pairs else out


def _load_row(l: Layout) -> str:
    """Returns C that loads row i of a block."""
    order = _order(l, "h") if l.spec.type.permuted else "0"
    name = "quantise_" if l.spec.int8 else "arrange_" if l.pairs else "widen_"
    return f"{name}(source_(p, i0 + i), {order}, {dots.of_rows(l.matrix, l.isa)});"


# **** many rows ****

def _many(l: Layout, s: CPUQuantGrouped) -> str:
    """The function of a block of many rows."""
    one, per = l.spec.grouped, PER[l.kind]
    units, block = one.k // per, l.pitch * s.block_m
    copy = f" + h * {block}" if l.copies > 1 else ""
    last = tiles.last(l.matrix)
    ended = f"""for (s64 i = 0; i < rows; i++) for (s64 lane = 0, k = 0, t = of; lane < {TILE}; lane += W)
        store_f32(sums[h][i] + lane, load_f32(sums[h][i] + lane){last});""" if last else ""
    return f"""
NOINLINE void many_(const operands *p, matrix w, s64 e, s64 i0, s64 rows, s64 t0, s64 t1, u8 *own) {{
  float (*sums)[{s.block_m}][{TILE}] = (float (*)[{s.block_m}][{TILE}])own;
  u32 *const brought = (u32 *)(sums + {one.halves});
  u32 panel[{panels.UNITS} * {TILE}] __attribute__((aligned(64)));
  for (s64 h = 0; h < {l.copies}; h++) for (s64 i = 0; i < rows; i++) {{ {_units(l, copy)} }}
  for (s64 t = t0; t < t1; t++) {{
    for (s64 h = 0; h < {one.halves}; h++) {{
      const s64 of = (e * {one.halves} + h) * {l.across} + t;
      const u32 *const x = brought{copy};
      for (s64 u = 0; u < {units}; u += {panels.UNITS}) {{
        const s64 count = {units} - u < {panels.UNITS} ? {units} - u : {panels.UNITS};
        for (s64 lane = 0; lane < {TILE}; lane += W) unpack_(w, of, lane, u * {per}, count, panel);
        for (s64 i = 0; i < rows; i += {l.strip})
          panel_(panel, x + i * {l.pitch} + u, count, sums[h] + i, !u);
      }}
      {ended}
    }}
    {_finish_tile(l)}
  }}
}}"""


def _units(l: Layout, copy: str) -> str:
    """C that brings row i in units."""
    to = f"brought{copy} + i * {l.pitch}"
    return f"""const {c_type(l.spec.grouped.dtype)} *from = source_(p, i0 + i);
    {panels.load_row(l.matrix, l.kind, 'from', to, _order(l, 'h'))}"""
