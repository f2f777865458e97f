"""Many rows in bytes times a matrix in tiles: codes and factors are unpacked once for a block of rows.

Protocol: the integers, and the order of float32's operations, are those of dots.py: results have the same
bits. `functions` makes the C function

    panels_(w, t, rows, q, d, sq, start, to)    the totals of tile t, of rows as rows.py brings them

    for each `COLUMNS` columns
      bytes without a sign, and float32 factors of each step       a panel, which stays in the first cache
      for some rows at a time, 16 outputs
        for each block: dot products, in 16 bits where VPMADDUBSW multiplies; totals += …
"""
from __future__ import annotations

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.quant_gemm import byte_dots, tiles
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

FEWEST_ROWS = 9         # fewer are for dots.py
COLUMNS = 512           # of a panel: 8 KB of bytes


def heights(isa: ISA) -> list[int]:
    """How many rows the main loops have, the largest first: totals and sums of a block fill the registers."""
    most = {16: 12, 8: 4, 4: 4}[isa.lanes]
    return [most, *(1 << i for i in reversed(range(most.bit_length())) if 1 << i < most)]


def vectors(isa: ISA) -> int:
    """Vectors of outputs that a main loop has."""
    return 2 if isa.lanes == 8 else 1


def functions(spec: QuantGemmSpec, isa: ISA) -> str:
    """The function of a tile, and those it calls. dots.py's are there."""
    k, step = spec.gemm.k, tiles.step_of(spec.type)
    names = factors(spec)
    room, more = min(COLUMNS, k), len(names) * TILE
    of_rows = f"q + i * {k} + first, d + i * {k // INT8_BLOCK} + first / {INT8_BLOCK}, " \
              f"sq + i * {k // step} + first / {step}, start + i * {k // step} + first / {step}"
    calls = " ".join(f"for (; i + {each} <= rows; i += {each}) bytes_{each}(panel + lane, numbers + lane, "
                     f"count, {of_rows}, to[i] + lane, !first);" for each in heights(isa))
    last = tiles.last(spec)
    ended = f"""for (s64 i = 0; i < rows; i++) for (s64 lane = 0, k = 0; lane < {TILE}; lane += W)
    store_f32(to[i] + lane, load_f32(to[i] + lane){last});""" if last else ""
    return "\n".join([_unpack(spec, isa), *(_main_loop(spec, isa, each) for each in heights(isa)), f"""
NOINLINE void panels_(matrix w, s64 t, s64 rows, const s8 *q, const float *d, const float *sq,
                      const s32 *start, float (*to)[{TILE}]) {{
  u32 panel[{room // 4 * TILE}] __attribute__((aligned(64)));
  float numbers[{room // step * more}] __attribute__((aligned(64)));
  for (s64 first = 0; first < {k}; first += {COLUMNS}) {{
    const s64 count = {k} - first < {COLUMNS} ? {k} - first : {COLUMNS};
    for (s64 lane = 0; lane < {TILE}; lane += W)
      unpack_(w, t, lane, first, count, panel + lane, numbers + lane);
    for (s64 lane = 0; lane < {TILE}; lane += {vectors(isa)} * W) {{ s64 i = 0; {calls} }}
  }}
  {ended}
}}"""])


def factors(spec: QuantGemmSpec) -> dict[str, str]:
    """C of a step's factors by name, as dots.py has them."""
    return tiles.factors(spec, spec.type.element.lsb)


def _unpack(spec: QuantGemmSpec, isa: ISA) -> str:
    """The function that brings `count` columns of W outputs from column `first` on."""
    step, names, lines = tiles.step_of(spec.type), factors(spec), list[str]()
    word = "codes" if byte_dots.has_sign_in_a(spec.type, isa) else "y"
    for at in range(0, INT8_BLOCK, step):
        lines.append(f"{{ const s64 k = at + {at};")
        lines += [f"store_f32(numbers + ((k - first) / {step} * {len(names)} + {i}) * {TILE}, {text});"
                  for i, text in enumerate(names.values())]
        lines += tiles.loads(spec, step, at) + tiles.quads(spec, step, at)
        lines += [f"*(vi_u *)(panel + ((k - first) / 4 + {i}) * {TILE}) = {word}{i};"
                  for i in range(step // 4)]
        lines.append("}")
    inner = "\n    ".join(lines)
    return f"""
NOINLINE void unpack_(matrix w, s64 t, s64 lane, s64 first, s64 count, u32 *restrict panel,
                      float *restrict numbers) {{
  for (s64 at = first; at < first + count; at += {INT8_BLOCK}) {{
    {inner}
  }}
}}"""


def _main_loop(spec: QuantGemmSpec, isa: ISA, rows: int) -> str:
    """The function that adds the products of a panel and `rows` rows to totals; `begin` sets these to 0."""
    k, step = spec.gemm.k, tiles.step_of(spec.type)
    cells = [(r, v) for r in range(rows) for v in range(vectors(isa))]
    begin = " ".join(f"vf total{r}_{v} = begin ? (vf)0.f : load_f32(to + {r * TILE} + {v} * W);"
                     for r, v in cells)
    stores = " ".join(f"store_f32(to + {r * TILE} + {v} * W, total{r}_{v});" for r, v in cells)
    lines = [f"const vf d{r} = (vf)d[b + {r * (k // INT8_BLOCK)}];" for r in range(rows)]
    for at in range(0, INT8_BLOCK, step):
        lines.append(f"{{ const s64 s = b * {INT8_BLOCK // step} + {at // step};")
        lines += _step(spec, isa, rows, at)
        lines.append("}")
    inner = "\n    ".join(lines)
    return f"""
NOINLINE void bytes_{rows}(const u32 *restrict panel, const float *restrict numbers, s64 count,
                           const s8 *restrict q, const float *restrict d, const float *restrict sq,
                           const s32 *restrict start, float *restrict to, int begin) {{
  {begin}
  for (s64 b = 0; b < count / {INT8_BLOCK}; b++) {{
    {inner}
  }}
  {stores}
}}"""


def _step(spec: QuantGemmSpec, isa: ISA, rows: int, at: int) -> list[str]:
    """C that adds the products of step s, at column `at` of its block, to totals."""
    type, k, step, names = spec.type, spec.gemm.k, tiles.step_of(spec.type), factors(spec)
    lanes, steps, out = range(vectors(isa)), k // step, list[str]()
    signed = byte_dots.has_sign_in_a(type, isa)
    shifted, word = tiles.shift(type) and not signed, "codes" if signed else "y"
    for r in range(rows):
        value = f"(vi)start[s + {r * steps}]" if shifted else "(vi)0"
        out += [f"vi c{r}_{v} = {value};" for v in lanes]
    for i in range(step // 4):
        quad = f"panel + (b * {INT8_BLOCK // 4} + {at // 4 + i}) * {TILE}"
        out += [f"const vi {word}{i}_{v} = *(const vi_u *)({quad} + {v} * W);" for v in lanes]
    names_of_lanes = tuple(f"_{v}" for v in lanes)
    out += byte_dots.products(type, isa, step, rows, f"q + b * {INT8_BLOCK} + {at}", k, names_of_lanes)
    for v in lanes:
        out.append("{")
        out += [f"const vf {name} = load_f32(numbers + (s * {len(names)} + {i}) * {TILE} + {v} * W);"
                for i, name in enumerate(names)]
        sums = [byte_dots.scale_sum(type, f"c{r}_{v}", f"sq[s + {r * steps}]") for r in range(rows)]
        out += [f"total{r}_{v} = fma_({value}, d{r}, total{r}_{v});" for r, value in enumerate(sums)]
        out.append("}")
    return out
