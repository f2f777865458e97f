"""Many rows of floats times a matrix in tiles: columns are dequantised once for a block of rows.

Protocol: operands are in units of 32 bits along k, as blocked GEMMs have them (cpu/gemm.h): pairs of bfloat16
where a is and the processor multiplies those, rounded once, as the reference does; else float32.

    for each block of block_m rows of a part
      units of all of their columns                              in the workspace
      for each tile of 16 outputs
        for each `UNITS` units along k
          dequantise them: a panel of units x 16                 stays in the first cache
          for `rows` rows at a time: totals += rows · panel      in registers, or by AMX tiles
        out = epilogue(totals)

Totals are added in the order of k. AMX multiplies pairs: a panel's units are operand b of TDPBF16PS.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.amx import finish
from tinygrad_nv.cpu.gemm.layout import PER, kind_of
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.quant_gemm import columns, decode, pairs, tiles
from tinygrad_nv.cpu.quant_gemm.schedules import QuantPanels
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

FEWEST_ROWS = 17            # fewer are for dots.py
FEWEST_OF_PAIRS = 129       # where pairs.py needs but a shift and a look-up for an operand: not of bytes
UNITS = 256                 # of a panel, 16 KB
TALLEST = {16: 16, 8: 6, 4: 3}      # rows by lanes: totals of a tile and its panel's unit fill the registers
STRIP = 32                  # rows of two AMX tiles, which one of the panel is multiplied with
MOST_M = 256                # rows of a block, whose units come from the second or third cache
PARTS = 4                   # for each thread, so that one that is held up does less
TILES_OF_PART = 8           # fewer take less time than bringing a part's rows


def problems(spec: QuantGemmSpec, s: QuantPanels) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    out = tiles.problems(spec)
    if spec.int8: out.append("activations of int8")
    by_tiles = multiplies_tiles(spec, s.isa)
    looked_up = pairs.takes(spec, s.isa) and spec.type.bits < 8
    fewest = FEWEST_OF_PAIRS if looked_up and not by_tiles else FEWEST_ROWS
    if spec.gemm.m < fewest: out.append(f"{spec.gemm.m} rows, at least {fewest}")
    if by_tiles and s.rows != STRIP: out.append(f"rows {s.rows}, {STRIP} are needed")
    elif not by_tiles and not 1 <= s.rows <= TALLEST[s.isa.lanes]:
        out.append(f"rows {s.rows}, 1 to {TALLEST[s.isa.lanes]}")
    elif not s.block_m or s.block_m % s.rows:
        out.append(f"block_m {s.block_m}, a multiple of {s.rows} is needed")
    return out


def default(spec: QuantGemmSpec, target: CPU) -> QuantPanels:
    """The default schedule: blocks of rows of one size, and strips of one size in them."""
    gemm, threads = spec.gemm, target.threads
    most = -(-gemm.m // -(-gemm.m // MOST_M))
    by_tiles = multiplies_tiles(spec, target.isa)
    rows = STRIP if by_tiles else -(-most // -(-most // TALLEST[target.isa.lanes]))
    items = -(-gemm.m // up(most, rows)) * -(-gemm.n // TILE)
    parts = 1 if threads == 1 else min(items, max(threads, min(threads * PARTS, items // TILES_OF_PART)))
    return QuantPanels(target.isa, parts, up(most, rows), rows)


def multiplies_tiles(spec: QuantGemmSpec, isa: ISA) -> bool:
    """Whether AMX multiplies."""
    return isa.level == "amx" and kind_of(spec.gemm, isa) == "pair"


def build(spec: QuantGemmSpec, s: QuantPanels) -> CPUKernel:
    """The kernel."""
    gemm, k, kind = spec.gemm, spec.gemm.k, kind_of(spec.gemm, s.isa)
    by_tiles = multiplies_tiles(spec, s.isa)
    per = PER[kind]
    units, across = k // per, -(-gemm.n // TILE)
    pitch = up(units, 16) + 16      # rows at distances of a power of two would share sets of the cache
    own = 4 * s.block_m * (TILE * gemm.parts + pitch)
    body = f"""
  {decode.declare_matrix(spec.buffers)}
  u8 *own = (u8 *)work + core_id * {own}ll;
  float (*sums)[{s.block_m}][{TILE}] = (float (*)[{s.block_m}][{TILE}])own;
  u32 *x = (u32 *)(sums + {gemm.parts}), panel[{UNITS} * {TILE}] __attribute__((aligned(64)));
  const s64 every = {'m' if gemm.symbolic else gemm.m}, down = (every + {s.block_m - 1}) / {s.block_m};
  const s64 items = down * {across}, end = items * (core_id + 1) / {s.parts};
  {'tiles_begin();' if by_tiles else ''}
  for (s64 item = items * core_id / {s.parts}, before = -1; item < end; item++) {{
    const s64 m0 = item / {across} * {s.block_m}, t = item % {across}, n0 = t * {TILE};
    const s64 rows = every - m0 < {s.block_m} ? every - m0 : {s.block_m};
    const s64 columns = {gemm.n} - n0 < {TILE} ? {gemm.n} - n0 : {TILE};
    if (m0 != before) {{ before = m0; {_load_rows(spec, kind, pitch)} }}
    for (s64 p = 0; p < {gemm.parts}; p++) for (s64 u = 0; u < {units}; u += {UNITS}) {{
      const s64 count = {units} - u < {UNITS} ? {units} - u : {UNITS};
      for (s64 l = 0; l < {TILE}; l += W) unpack_(w, p * {across} + t, l, u * {per}, count, panel);
      for (s64 i = 0; i < rows; i += {s.rows}) panel_(panel, x + i * {pitch} + u, count, sums[p] + i, !u);
    }}
    {_last(spec, across)}
    for (s64 i = 0; i < rows; i++) for (s64 j = 0; j < columns; j += W) {{ {finish(gemm)} }}
  }}
  {'tiles_end();' if by_tiles else ''}"""
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.buffers),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), decode.struct(spec.buffers), tiles.functions(spec.type),
              columns.functions(spec.type, s.isa), PAIR if kind == "pair" else "", unpack(spec, s.isa, kind),
              *([header("amx.h"), tiles_micro(pitch)] if by_tiles else [micro(kind, s, pitch)])]
    return kernel(f"quant_panels_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


def _load_rows(spec: QuantGemmSpec, kind: str, pitch: int) -> str:
    """Returns C that copies the rows of a block into the workspace, in units."""
    a = spec.gemm.a
    return f"""for (s64 i = 0; i < rows; i++) {{
      const {c_type(a.dtype)} *p = a + {a.offset} + (m0 + i) * {a.mn}ll;
      {load_row(spec, kind, 'p', f'x + i * {pitch}', 'order')}
    }}"""


def load_row(spec: QuantGemmSpec, kind: str, row: str, to: str, order: str) -> str:
    """Returns C that copies a row into units."""
    a, k, name = spec.gemm.a, spec.gemm.k, short(spec.gemm.a.dtype)
    element = "u16" if kind == "pair" else "float"
    at = f"{f'({order})[k]' if spec.type.permuted else 'k'} * {a.k}ll"
    one = f"to[k] = {f'{row}[{at}]' if kind == 'pair' else f'one_{name}({row} + {at})'};"
    many = f"*(vh_u *)(to + k) = *(const vh_u *)({row} + k);" if kind == "pair" else \
        f"store_f32(to + k, load_{name}({row} + k));"
    straight = a.k == 1 and not spec.type.permuted
    return f"""{element} *to = ({element} *)({to});
      for (s64 k = 0; k < {k}; {f'k += W) {many}' if straight else f'k++) {one}'}"""


def unpack(spec: QuantGemmSpec, isa: ISA, kind: str) -> str:
    """The function that dequantises `count` units of W outputs from column `first` on."""
    type, step, lines = spec.type, tiles.step_of(spec.type), list[str]()
    per = PER[kind]
    for at in range(0, INT8_BLOCK, step):
        lines.append(f"{{ const s64 k = at + {at};")
        lines += [f"const vf {name} = {text};"
                  for name, text in tiles.factors(spec, columns.lsb(type, isa)).items()]
        more, values = columns.step(spec, isa, step, at)
        lines += more
        behind = f"{columns.larger(type)} * scale{' - low' if type.mins else ''}"
        numbers = [value + behind for value in values]
        for i in range(0, step, per):
            unit = f"pair_({numbers[i]}, {numbers[i + 1]})" if kind == "pair" else f"as_i({numbers[i]})"
            lines.append(f"*(vi_u *)(to + (k - first) / {per} * {TILE} + {i // per * TILE}) = {unit};")
        lines.append("}")
    inner = "\n    ".join(lines)
    return f"""
NOINLINE void unpack_(matrix w, s64 t, s64 lane, s64 first, s64 count, u32 *to) {{
  to += lane;
  for (s64 at = first; at < first + count * {per}; at += {INT8_BLOCK}) {{
    {inner}
  }}
}}"""


def micro(kind: str, s: QuantPanels, pitch: int) -> str:
    """The function that adds units of `rows` rows times a panel's to totals; `begin` sets these to 0."""
    vectors = range(0, TILE, s.isa.lanes)
    cells = [(r, v, f"t{r}_{v}") for r in range(s.rows) for v in vectors]
    loads = " ".join(f"vf {name} = begin ? (vf)0.f : load_f32(to[{r}] + {v});" for r, v, name in cells)
    read = " ".join(f"const vi b{v} = *(const vi_u *)(panel + u * {TILE} + {v});" for v in vectors)
    dots = " ".join(f"{name} = unit_({name}, x + u + {r * pitch}, b{v});" for r, v, name in cells)
    stores = " ".join(f"store_f32(to[{r}] + {v}, {name});" for r, v, name in cells)
    return f"""
INLINE vf unit_(vf c, const u32 *x, vi b) {{
#if {int(kind == 'pair')} && HAVE_BF16
  __asm__("vdpbf16ps %2%{{1to16%}}, %1, %0" : "+v"(c) : "v"(b), "m"(*x));
  return c;
#else
  return dot_{kind}(c, (vi)(s32)*x, b);
#endif
}}
NOINLINE void panel_(const u32 *restrict panel, const u32 *restrict x, s64 count,
                     float (*restrict to)[{TILE}], int begin) {{
  {loads}
  for (s64 u = 0; u < count; u++) {{ {read} {dots} }}
  {stores}
}}"""


def tiles_micro(pitch: int) -> str:
    """Returns the micro kernel of two AMX tiles of rows."""
    each = (0, 1)
    loads = " ".join(f"tile_load({r}, to + {16 * r}, {4 * TILE});" for r in each)
    read = " ".join(f"tile_load({4 + r}, x + u + {16 * r * pitch}, {4 * pitch});" for r in each)
    return f"""
NOINLINE void panel_(const u32 *panel, const u32 *x, s64 count, float (*to)[{TILE}], int begin) {{
  TILES;
  if (begin) {{ {' '.join(f'tile_zero({r});' for r in each)} }} else {{ {loads} }}
  for (s64 u = 0; u < count; u += 16) {{
    {read} tile_load(6, panel + u * {TILE}, {4 * TILE});
    {' '.join(f'tile_dot(bf16ps, {r}, {4 + r}, 6);' for r in each)}
  }}
  {' '.join(f'tile_store({r}, to + {16 * r}, {4 * TILE});' for r in each)}
}}"""


def _last(spec: QuantGemmSpec, across: int) -> str:
    """C that multiplies totals with factors of all columns."""
    if not (last := tiles.last(spec)): return ""
    return f"""for (s64 p = 0; p < {spec.gemm.parts}; p++) for (s64 i = 0; i < rows; i++)
      for (s64 lane = 0, k = 0, of = t; lane < {TILE}; lane += W) {{
        const s64 t = p * {across} + of;
        store_f32(sums[p][i] + lane, load_f32(sums[p][i] + lane){last});
      }}"""


# two vectors of float32 as pairs of bfloat16
PAIR = """
INLINE vi pair_(vf low, vf high) {
#if HAVE_BF16
  static const u16 places[32] __attribute__((aligned(64))) = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
    7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  vi x;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(x) : "v"(low), "v"(high));
  __asm__("vpermw %1, %2, %0" : "=v"(x) : "v"(x), "v"(*(const vi *)places));
  return x;
#else
  vi x = __builtin_convertvector(narrow_bf16(low), vi), y = __builtin_convertvector(narrow_bf16(high), vi);
  return x | y << 16;
#endif
}"""
