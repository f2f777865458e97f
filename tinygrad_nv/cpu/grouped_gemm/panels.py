"""Groups of many rows: units of their rows side by side, times a matrix whose rows lie as they do in memory.

Protocol: `functions` makes the C function

    many_(p, e, first, last, n0, n1, own)    columns n0 … n1 of rows first … last of group e

    for each block of up to `block_m` rows, all of them as many
      their units, `STRIP` rows side by side                        in `own`, the part's workspace
      for each one or two panels of 16 columns
        for each `BLOCK_UNITS` units along k
          the panels' units, where they are not read in place       stay in the first cache
          for each strip or two of rows: sums += panel · strips     in registers, or AMX tiles
        epilogue of the panels' sums, transposed, a vector of columns at a time

A matrix is the operand whose elements are spread over lanes, or of which an AMX tile is 16 rows of 64 bytes:
so nothing of it is transposed, and lanes are rows of the group, whose units are packed once for all columns.
Units behind a row, and rows and columns that are missing, are zeros.
"""
from __future__ import annotations

from tinygrad.dtype import DType

from tinygrad_nv.cpu.gemm.layout import PANEL, UNITS
from tinygrad_nv.cpu.grouped_gemm.layout import BLOCK_UNITS, PITCH, STRIP, Layout
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.tile.expression import short

# of a block, by AMX: with more, columns at distances of a power of two are missed in the first cache again.
# (24 groups, 1536 x 2048: 32 rows in place 27.8 ms, copied 31.2; 64 rows 55.1, 51.5; 192 rows 136.6, 106.7)
IN_PLACE_ROWS = 64


def functions(l: Layout, block_m: int) -> str:
    """The function, and those it calls."""
    micro = [_tiles(l, block_m, strips) for strips in (1, 2)] if l.by_tiles else \
        [_micro(l, block_m, vectors, columns) for vectors, columns in _shapes(l)]
    copied = _transpose_panel(l) if l.spec.transposed else _copy_panel(l)
    return "\n".join([*_some(l), _pack_rows(l), copied, *micro, _many(l, block_m)])


def _shapes(l: Layout) -> list[tuple[int, int]]:
    """Vectors of rows by columns of blocks in registers: one strip, and two where that is worth its own."""
    return [(1, 16), (2, 8)] if l.isa.lanes == 16 else [(2, 6)]


# **** units ****

def _some(l: Layout) -> list[str]:
    """The functions that load W units of x, and of w, `left` elements of which there are, and read no
    other."""
    return [_units(l, name, dtype) for name, dtype in (("units_", l.spec.dtype), ("matrix_", l.spec.matrix))]


def _units(l: Layout, name: str, dtype: DType) -> str:
    kind, element = short(dtype), c_type(dtype)
    if l.kind == "fma": body = f"return as_i(left >= W ? load_{kind}(p) : load_n_{kind}(p, left));"
    else: body = """if (left >= 2 * W) return *(const vi_u *)p;
  u16 some[2 * W] = {0};
  for (s64 i = 0; i < left; i++) some[i] = p[i];
  return *(const vi_u *)some;"""
    return f"INLINE vi {name}(const {element} *p, s64 left) {{\n  {body}\n}}"


def _pack_rows(l: Layout) -> str:
    """The function that brings rows into units, a strip's side by side."""
    spec, element = l.spec, c_type(l.spec.dtype)
    return f"""
NOINLINE void pack_(const operands *p, s64 first, s64 rows, u32 *to) {{
  for (s64 r = 0; r < rows; r += W) {{
    const {element} *x[W];
    for (s64 i = 0; i < W; i++) x[i] = r + i < rows ? source_(p, first + r + i) : 0;
    u32 *strip = to + r / {STRIP} * {STRIP * l.units} + r % {STRIP};
    for (s64 u = 0; u < {l.units}; u += W) {{
      const s64 left = {spec.k} - u * {l.per};
      vi v[W];
      for (int i = 0; i < W; i++) v[i] = x[i] ? units_(x[i] + u * {l.per}, left) : (vi)0;
      transpose(v);
#pragma clang loop unroll(full)
      for (int i = 0; i < W; i++) *(vi_u *)(strip + (u + i) * {STRIP}) = v[i];
    }}
  }}
  for (s64 r = (rows + W - 1) / W * W; r % {STRIP}; r += W)
    for (s64 u = 0; u < {l.units}; u++)
      *(vi_u *)(to + r / {STRIP} * {STRIP * l.units} + r % {STRIP} + u * {STRIP}) = (vi)0;
}}"""


def _copy_panel(l: Layout) -> str:
    """The function that brings `count` units of a panel of `columns` columns, from element k on, and fetches
    the same of the next step."""
    spec, element = l.spec, c_type(l.spec.matrix)
    ahead = l.step * spec.k
    return f"""
NOINLINE void copy_(const {element} *w, s64 columns, s64 k, s64 count, u32 *to) {{
  for (s64 c = 0; c < {PANEL}; c++) for (s64 u = 0; u < count; u += W) {{
    const {element} *from = w + c * {spec.k} + k + u * {l.per};
    __builtin_prefetch(from + {ahead}, 0, 2);
    *(vi_u *)(to + c * {PITCH} + u) = c < columns ? matrix_(from, {spec.k} - k - u * {l.per}) : (vi)0;
  }}
}}"""


def _transpose_panel(l: Layout) -> str:
    """Returns the function that copies units of a matrix whose rows are k: W rows of units of W columns at a
    time."""
    spec, element, kind = l.spec, c_type(l.spec.dtype), short(l.spec.dtype)

    def row(k: str) -> str:
        load = f"load_n_{kind}(w + ({k}) * {spec.n} + c, columns - c)"
        return f"({k} < {spec.k} ? as_i({load}) : (vi)0)"
    unit = f"const s64 k0 = k + u + i; v[i] = {row('k0')};"
    # the upper halves of two widened bfloat16 are a pair
    if l.per == 2: unit = f"""const s64 k0 = k + 2 * (u + i), k1 = k0 + 1;
      v[i] = (vi)((vu){row('k0')} >> 16 | (vu){row('k1')});"""
    return f"""
NOINLINE void copy_(const {element} *w, s64 columns, s64 k, s64 count, u32 *to) {{
  for (s64 c = 0; c < {PANEL}; c += W) for (s64 u = 0; u < count; u += W) {{
    vi v[W];
    for (s64 i = 0; i < W; i++) {{ {unit} }}
    transpose(v);
    for (s64 i = 0; i < W; i++) *(vi_u *)(to + (c + i) * {PITCH} + u) = v[i];
  }}
}}"""


# **** the innermost loops ****

def _micro(l: Layout, block_m: int, vectors: int, columns: int) -> str:
    """The function that adds `count` units of a panel times `vectors` vectors of rows to sums; `begin` sets
    these to 0."""
    def at(v: int) -> str:
        lane = v * l.isa.lanes
        return f"{lane // STRIP * STRIP * l.units} + u * {STRIP} + {lane % STRIP}"
    read = " ".join(f"const vi x{v} = *(const vi_u *)(x + {at(v)});" for v in range(vectors))

    def block(first: int, count: int) -> str:
        cells = [(c, v, f"s{c}_{v}") for c in range(count) for v in range(vectors)]
        loads = " ".join(f"vf {s} = begin ? (vf)0.f : load_f32(sums + {c * block_m} + {v} * W);"
                         for c, v, s in cells)
        dots = " ".join(f"{s} = unit_({s}, from + u + {c * PITCH}, x{v});" for c, v, s in cells)
        stores = " ".join(f"store_f32(sums + {c * block_m} + {v} * W, {s});" for c, v, s in cells)
        return f"""{{
    const u32 *from = panel + {first * PITCH};
    float *const sums = to + {first * block_m};
    {loads}
    for (s64 u = 0; u < count; u++) {{ {read} {dots} }}
    {stores}
  }}"""
    blocks = "\n  ".join(block(first, min(columns, PANEL - first)) for first in range(0, PANEL, columns))
    unit = f"""
INLINE vf unit_(vf c, const u32 *w, vi x) {{
#if {int(l.kind == 'pair')} && HAVE_BF16
  __asm__("vdpbf16ps %2%{{1to16%}}, %1, %0" : "+v"(c) : "v"(x), "m"(*w));
  return c;
#else
  return dot_{l.kind}(c, (vi)(s32)*w, x);
#endif
}}""" if (vectors, columns) == _shapes(l)[0] else ""
    return f"""{unit}
NOINLINE void micro_{vectors}(const u32 *restrict panel, const u32 *restrict x, s64 count, float *restrict to,
                              int begin) {{
  {blocks}
}}"""


def _tiles(l: Layout, block_m: int, strips: int) -> str:
    """Returns the function that multiplies two panels, whose columns are `row` bytes apart, and so many
    strips, by AMX. The first strips of a block fetch as many bytes from `ahead` of each panel as they
    read."""
    cells = [(2 * p + s, f"to + {p * PANEL * block_m + s * STRIP}") for p in range(2) for s in range(strips)]
    loads = " ".join(f"tile_load({t}, {at}, {4 * block_m});" for t, at in cells)
    stores = " ".join(f"tile_store({t}, {at}, {4 * block_m});" for t, at in cells)
    read = " ".join([*(f"tile_load({4 + p}, panel{p} + 4 * u, row);" for p in range(2)),
                     *(f"tile_load({6 + s}, x + u * {STRIP} + {s * STRIP * l.units}, {4 * STRIP});"
                       for s in range(strips))])
    dots = " ".join(f"tile_dot(bf16ps, {t}, {4 + t // 2}, {6 + t % 2});" for t, _ in cells)
    fetched = " ".join(f"__builtin_prefetch(panel{p} + ahead + {4 * PANEL} * u + {line}, 0, 2);"
                       for p in range(2) for line in range(0, 4 * UNITS * PANEL, 64))
    return f"""
NOINLINE void tiles_{strips}(const u8 *panel0, const u8 *panel1, s64 row, const u32 *x, s64 count, float *to,
                             int begin, s64 ahead) {{
  TILES;
  if (begin) {{ {' '.join(f'tile_zero({t});' for t, _ in cells)} }} else {{ {loads} }}
  if (ahead) for (s64 u = 0; u < count; u += {UNITS}) {{ {fetched} {read} {dots} }}
  else for (s64 u = 0; u < count; u += {UNITS}) {{ {read} {dots} }}
  {stores}
}}"""


# **** a group ****

def _many(l: Layout, block_m: int) -> str:
    return f"""
NOINLINE void many_(const operands *p, s64 e, s64 first, s64 last, s64 n0, s64 n1, u8 *own) {{
  float *const sums = (float *)own;
  u32 *const x = (u32 *)(sums + {l.panels * PANEL * block_m});
  u32 copies[{l.panels}][{PANEL * PITCH}] __attribute__((aligned(64)));
  const s64 blocks = (last - first + {block_m - 1}) / {block_m};
  const s64 most = ((last - first + blocks - 1) / blocks + {STRIP - 1}) / {STRIP} * {STRIP};
  for (s64 i0 = first; i0 < last; i0 += most) {{
    const s64 rows = last - i0 < most ? last - i0 : most;
    pack_(p, i0, rows, x);
    for (s64 n = n0; n < n1; n += {l.step}) {{
      for (s64 u0 = 0; u0 < {l.units}; u0 += {BLOCK_UNITS}) {{
        const s64 count = {l.units} - u0 < {BLOCK_UNITS} ? {l.units} - u0 : {BLOCK_UNITS};
        {_multiply_block(l, block_m)}
      }}
      for (s64 r = 0; r < rows; r += W) for (s64 j = 0; j < {l.step}; j += W) {{
        if (n + j >= n1) break;
        {_finish_columns(l, block_m)}
      }}
    }}
  }}
}}"""


def _multiply_block(l: Layout, block_m: int) -> str:
    """C that adds a block of units to all sums of a step's columns."""
    spec = l.spec
    columns = ["n1 - n" if spec.activation or not h else f"n1 - n - {h * PANEL}" for h in range(l.panels)]
    starts = [h * spec.columns if spec.activation else h * PANEL for h in range(l.panels)]
    w = [f"p->w + e * {spec.n * spec.k} + {start} + n" if spec.transposed else
         f"p->w + (e * {spec.n} + {start} + n) * {spec.k}" for start in starts]
    copies = " ".join(f"copy_({at}, {count}, u0 * {l.per}, count, copies[{h}]);"
                      for h, (at, count) in enumerate(zip(w, columns, strict=True)))
    strip = f"x + (r / {STRIP} * {l.units} + u0) * {STRIP}"
    if not l.by_tiles:
        two = f"""if (r + {STRIP} < rows) {{ micro_2(copies[h], {strip}, count, to + r, !u0); r += {STRIP}; }}
            else micro_1(copies[h], {strip}, count, to + r, !u0);"""
        more = f" + r % {STRIP}"
        one = f"micro_2(copies[h], {strip}{more}, count, to + r, !u0);"
        by = STRIP if l.isa.lanes == 16 else 2 * l.isa.lanes
        return f"""{copies}
        for (s64 h = 0; h < {l.panels}; h++) {{
          float *const to = sums + h * {PANEL * block_m};
          for (s64 r = 0; r < rows; r += {by}) {{ {two if l.isa.lanes == 16 else one} }}
        }}"""
    # a second panel where there are no more columns is any other, whose sums nothing reads
    fits = f"rows <= {IN_PLACE_ROWS} && (n1 - n >= {l.step} || n1 - n == {PANEL})" if l.in_place else "0"
    return f"""const u8 *panel0 = (const u8 *)copies[0], *panel1 = (const u8 *)copies[1];
        s64 row = {4 * PITCH}, ahead = 0;
        if ({fits}) {{
          panel0 = (const u8 *)({w[0]} + u0 * {l.per});
          panel1 = n1 - n < {l.step} ? panel0 : (const u8 *)({w[1]} + u0 * {l.per});
          row = {spec.k * spec.dtype.itemsize};
          ahead = row * {l.step} + u0 * {4 * (PANEL - 1)};
        }} else {{ {copies} }}
        for (s64 r = 0; r < rows; r += {2 * STRIP}) {{
          if (r + {STRIP} < rows) tiles_2(panel0, panel1, row, {strip}, count, sums + r, !u0, r ? 0 : ahead);
          else tiles_1(panel0, panel1, row, {strip}, count, sums + r, !u0, r ? 0 : ahead);
        }}"""


def _finish_columns(l: Layout, block_m: int) -> str:
    """C that finishes W columns from n + j on of W rows from r on."""
    halves = range(l.spec.halves)
    # panels lie one after the other: column j of a step without an activation is column j of their sums
    loads = " ".join(f"y{h}[i] = as_i(load_f32(sums + ({h * PANEL} + j + i) * {block_m} + r));"
                     for h in halves)
    made = ", ".join(f"as_f(y{h}[i])" for h in halves)
    return f"""vi {', '.join(f'y{h}[W]' for h in halves)};
        for (int i = 0; i < W; i++) {{ {loads} }}
        {' '.join(f'transpose(y{h});' for h in halves)}
        for (int i = 0; i < W && r + i < rows; i++)
          finish_(p, e, i0 + r + i, n + j, n1 - n - j, {made});"""
