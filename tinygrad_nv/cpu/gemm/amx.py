"""Products of bfloat16 and of bytes by AMX tiles.

Protocol: the loops of gemm/blocked/kernel.py around an innermost step of 2 x 2 tiles of 16 x 16 sums, which a
row of two tiles of a and a column of two tiles of b update; eight tiles in all, so every tile loaded is used
twice:

    tile 0 … 3   sums: c[i][j] is tile 2 i + j
    tile 4, 5    a: 16 rows of 64 bytes along k
    tile 6, 7    b: 16 units along k of 16 columns

    for each tile of block_m x block_n of the result               shared out among parts
      for each block of k
        for each pair of panels of 16 columns of the tile
          pack b: block_k x 2 x 16, units of 32 bits along k       stays in the first cache
          for each strip of 32 rows: sums += strip · panels        in tiles, in memory between blocks
      epilogue of the tile's sums, a vector at a time

The two panels are neighbouring columns, or the same columns of two parts of b. Rows of a are read where they
lie, if they are K-major and k is a multiple of a tile; only a strip with rows missing is copied, with zeros.
Else all of a is packed (gemm/blocked/pack.py). The order in which an element is summed does not depend on
tiles or parts. Tiles flush subnormal numbers and round to nearest: amx.h, which has the same in plain C for
tests on machines without (`ISA.emulated`).
"""
from __future__ import annotations

from math import prod

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.gemm.blocked.blocks import count_parts
from tinygrad_nv.cpu.gemm.blocked.pack import packing
from tinygrad_nv.cpu.gemm.gemv.main_loop import apart, at
from tinygrad_nv.cpu.gemm.layout import PANEL, PER, STRIP, UNITS, for_tiles, tile_kind, tile_multiples
from tinygrad_nv.cpu.gemm.schedules import Amx
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

FEWEST_ROWS = 17         # one row more than a tile: fewer are for gemm/gemv/kernel.py
STACK_BYTES = 1 << 20    # of sums, of a panel pair of b, and of packed a
MOST_M, MOST_N = 1024, 128
PACKED_M = 256           # rows of a tile where all of a is packed


def problems(spec: GemmSpec, s: Amx) -> list[str]:
    """Why a product cannot have a schedule; empty when it can."""
    if out := _find_problems(spec, s.isa): return out
    spec = for_tiles(spec)
    named = zip(("block_m", "block_n", "block_k"), (s.block_m, s.block_n, s.block_k), tile_multiples(spec),
                strict=True)
    out = [f"{name} {value}, a multiple of {of} is needed" for name, value, of in named
           if value < of or value % of]
    if not out and (need := _stack_bytes(spec, s)) > STACK_BYTES:
        out.append(f"{need} bytes on a stack, at most {STACK_BYTES}")
    return out


def _find_problems(spec: GemmSpec, isa: ISA) -> list[str]:
    """Returns what is in the way of a product, whatever the schedule."""
    out = expression.problems(spec.epilogue)
    if isa.level != "amx": out.append(f"no tiles on {isa}")
    if spec.a.dtype not in (dtypes.bfloat16, *INT8S): out.append(f"tiles of {short(spec.a.dtype)}")
    if spec.m < FEWEST_ROWS: out.append(f"{spec.m} rows, at least {FEWEST_ROWS}")
    if spec.parts > 2: out.append(f"{spec.parts} parts, at most 2")
    return out


def default(spec: GemmSpec, target: CPU) -> Amx:
    """The default schedule, where none was tuned."""
    spec = for_tiles(spec)
    per, (_, step, _) = PER[tile_kind(spec)], tile_multiples(spec)
    # three fourths of the first cache for two panels of b
    deepest = max(UNITS, target.l1_bytes * 3 // 4 // (4 * 2 * PANEL) // UNITS * UNITS)
    units = -(-spec.k // per)
    block_k = up(-(-units // -(-units // deepest)), UNITS)
    most = MOST_M if in_place(spec) else PACKED_M
    block_m = up(-(-spec.m // -(-spec.m // most)), STRIP)
    widest = max(step, min(MOST_N, up(spec.n, step)) // spec.parts)
    down, across = -(-spec.m // block_m) * spec.matrices, -(-spec.n // widest)
    while down * across % target.threads and -(-spec.n // across) > step: across += 1
    block_n = up(-(-spec.n // across), step)
    tiles = down * -(-spec.n // block_n)
    return Amx(target.isa, count_parts(spec, tiles, target), block_m, block_n, block_k * per)


def in_place(spec: GemmSpec) -> bool:
    """Whether tiles are loaded from a as it lies."""
    return spec.a.k == 1 and spec.k % (UNITS * PER[tile_kind(spec)]) == 0


def _pitch(spec: GemmSpec, s: Amx) -> int:
    """Units from a row of packed a to the next: an odd number of cache lines, so that they fall into
    different sets."""
    lines = up(s.block_k // PER[tile_kind(spec)], UNITS) // UNITS
    return (lines | 1) * UNITS


def _rows_to_pack(spec: GemmSpec, s: Amx) -> int: return STRIP if in_place(spec) else s.block_m


def _stack_bytes(spec: GemmSpec, s: Amx) -> int:
    b = 2 * PANEL * s.block_k // PER[tile_kind(spec)]
    return 4 * (spec.parts * s.block_m * s.block_n + _rows_to_pack(spec, s) * _pitch(spec, s) + b)


# **** the kernel ****

def build(spec: GemmSpec, schedule: Amx) -> CPUKernel:
    """The kernel of a product."""
    named, spec = spec, for_tiles(spec)
    kind, step = tile_kind(spec), _pitch(spec, schedule)
    before = [header("gemm.h"), header("amx.h"), packing("a", spec.a, kind, step),
              packing("b", spec.b, kind, PANEL), _micro(spec, schedule)]
    inputs = [(c_type(spec.a.dtype), "a"), (c_type(spec.b.dtype), "b")]
    if named is not spec: inputs.reverse()
    inputs += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    return kernel(f"amx_{named.m}x{named.n}x{named.k}", schedule.isa, _body(spec, schedule),
                  [(c_type(spec.out.dtype), "out")], inputs, ["m"] if spec.symbolic else [], schedule.parts,
                  before="\n".join(before))


def _dot(spec: GemmSpec) -> str:
    if spec.a.dtype not in INT8S: return "bf16ps"
    return "b" + "".join("s" if one.dtype == dtypes.int8 else "u" for one in (spec.a, spec.b)) + "d"


def _micro(spec: GemmSpec, s: Amx) -> str:
    """32 rows by two panels: `a` with rows `row` bytes apart, the sums of the panels at c0 and c1."""
    cells = [(2 * i + j, f"c{j} + {16 * i * s.block_n}") for i in range(2) for j in range(2)]
    zeros = " ".join(f"tile_zero({t});" for t, _ in cells)
    loads = " ".join(f"tile_load({t}, {at}, {4 * s.block_n});" for t, at in cells)
    dots = " ".join(f"tile_dot({_dot(spec)}, {t}, {4 + t // 2}, {6 + t % 2});" for t, _ in cells)
    stores = " ".join(f"tile_store({t}, {at}, {4 * s.block_n});" for t, at in cells)
    panel = PANEL * s.block_k // PER[tile_kind(spec)]
    return f"""
NOINLINE void micro(const u8 *a, s64 row, const u32 *b, s32 *c0, s32 *c1, s64 steps, int first) {{
  TILES;
  if (first) {{ {zeros} }} else {{ {loads} }}
  for (s64 k = 0; k < steps; k++) {{
    tile_load(4, a + 64 * k, row); tile_load(5, a + 16 * row + 64 * k, row);
    tile_load(6, b + {16 * PANEL} * k, 64); tile_load(7, b + {panel} + {16 * PANEL} * k, 64);
    {dots}
  }}
  {stores}
}}"""


def _body(spec: GemmSpec, s: Amx) -> str:
    per, parts, step = PER[tile_kind(spec)], s.parts, tile_multiples(spec)[1]
    across, panel = -(-spec.n // s.block_n), PANEL * s.block_k // per
    indices = [f"const s64 b{i} = matrix / {prod(spec.batch[i + 1:])} % {extent};"
               for i, extent in enumerate(spec.batch)]
    a = at(spec.a.offset, ("(m0 + i)", spec.a.mn), ("k0", spec.a.k), *apart(spec.a.batch))
    # the second panel: the next columns, or the same of the other part
    b = [at(spec.b.offset + j * (spec.part if spec.parts == 2 else 0),
            (f"(n0 + j + {j * PANEL if spec.parts == 1 else 0})", spec.b.mn), ("k0", spec.b.k),
            *apart(spec.b.batch)) for j in range(2)]
    left = [f"columns - j - {j * PANEL if spec.parts == 1 else 0}" for j in range(2)]
    packs = " ".join(f"pack_b(b + {b[j]}, right + {j * panel}, {left[j]}, {PANEL}, deep);" for j in range(2))
    second = f"sums[0][i][j + {PANEL}]" if spec.parts == 1 else "sums[1][i][j]"
    rest = f"right, &sums[0][i][j], &{second}, steps, !k0"
    where, row = f"(const u8 *)(left + i * {_pitch(spec, s)})", 4 * _pitch(spec, s)
    if in_place(spec):
        packed = f"{{ const s64 i = rows / {STRIP} * {STRIP}; if (i < rows) {_pack_a(a)} }}"
        strip = f"""if (i + {STRIP} <= rows)
            micro((const u8 *)(a + {a}), {spec.a.mn * spec.a.dtype.itemsize}, {rest});
          else micro((const u8 *)left, {row}, {rest});"""
    else:
        packed = f"for (s64 i = 0; i < rows; i += {STRIP}) {_pack_a(a, f'i * {_pitch(spec, s)}')}"
        strip = f"micro({where}, {row}, {rest});"
    clear = "" if spec.k % (UNITS * per) == 0 else f"""
      for (s64 u = units; u < {UNITS} * steps; u++) {{
        for (s64 i = 0; i < {up(_rows_to_pack(spec, s), STRIP)}; i++) left[i * {_pitch(spec, s)} + u] = 0;
        *(vi_u *)(right + u * {PANEL}) = *(vi_u *)(right + {panel} + u * {PANEL}) = (vi)0;
      }}"""
    return f"""
  u32 left[{_rows_to_pack(spec, s) * _pitch(spec, s)}] __attribute__((aligned(64)));
  u32 right[{2 * panel}] __attribute__((aligned(64)));
  s32 sums[{spec.parts}][{s.block_m}][{s.block_n}] __attribute__((aligned(64)));
  const s64 every = {'m' if spec.symbolic else spec.m}, down = (every + {s.block_m - 1}) / {s.block_m};
  const s64 tiles = down * {across * spec.matrices};
  tiles_begin();
  for (s64 t = tiles * core_id / {parts}; t < tiles * (core_id + 1) / {parts}; t++) {{
    const s64 m0 = t % down * {s.block_m}, n0 = t / down % {across} * {s.block_n};
    const s64 matrix = t / down / {across};
    {' '.join(indices)}
    const s64 rows = every - m0 < {s.block_m} ? every - m0 : {s.block_m};
    const s64 columns = {spec.n} - n0 < {s.block_n} ? {spec.n} - n0 : {s.block_n};
    for (s64 k0 = 0; k0 < {spec.k}; k0 += {s.block_k}) {{
      const s64 deep = {spec.k} - k0 < {s.block_k} ? {spec.k} - k0 : {s.block_k};
      const s64 units = (deep + {per - 1}) / {per}, steps = (units + {UNITS - 1}) / {UNITS};
      {clear}
      {packed}
      for (s64 j = 0; j < columns; j += {step}) {{
        {packs}
        for (s64 i = 0; i < rows; i += {STRIP}) {{ {strip} }}
      }}
    }}
    for (s64 i = 0; i < rows; i++) for (s64 j = 0; j < columns; j += W) {{ {finish(spec)} }}
  }}
  tiles_end();"""


def _pack_a(source: str, to: str = "0") -> str:
    rows = f"rows - i < {STRIP} ? rows - i : {STRIP}"
    return f"pack_a(a + {source}, left + {to}, {rows}, {STRIP}, deep);"


def finish(spec: GemmSpec) -> str:
    """The epilogue of a vector of `sums[part][i][j]`, of row m0 + i and of `columns` from n0 on, and its
    store."""
    kind, vector = short(spec.out.dtype), "vi" if spec.a.dtype in INT8S else "vf"
    names = [f"s{p}" for p in range(spec.parts)]
    lines = ["const s64 left_over = columns - j;"]
    lines += [f"const {vector} {name} = *(const {vector}_u *)&sums[{p}][i][j];"
              for p, name in enumerate(names)]
    place = LanePlace(names, "(m0 + i)", "(n0 + j)", [f"b{i}" for i in range(len(spec.batch))], "left_over")
    made, value = statements(spec.epilogue, place)
    o = spec.out
    to = f"out + {at(o.offset, ('(m0 + i)', o.m), ('(n0 + j)', o.n), *apart(o.batch))}"
    store = f"store_n_{kind}({to}, {value}, left_over);" if spec.out.n == 1 else \
        f"scatter_{kind}({to}, {spec.out.n}, {value}, left_over);"
    return " ".join([*lines, *made, store])
