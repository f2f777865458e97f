"""Sums of 9 to 64 rows of bfloat16 by dot products of pairs, where b's rows lie along k.

Protocol: C that fills `sums[p · m + i][c]` for `count` columns from column n0, where `GemvOperands` has
declared a. Vectors lie along k on both sides, so neither is packed:

    for each block of k, for each block of rows of a       which together stay in the first cache
      for each part, for each `ROWS` columns
        for each `ROWS` rows: 16 sums += row · column      in registers, of which 32 loads feed 64 products
        the lanes of the 16 sums are added, all at once    gemm.h

Columns are read from memory by the first block of rows, and by the others from the second cache. A processor
does not fetch fast enough by itself what is used so often, so the columns `AHEAD` groups later are fetched,
each tile of rows a share of them: 16 rows by 49152 x 768 take 2.4 ms on one core of Zen 5, and 5.2 without.

clang makes 28 instructions of the loop's step: 16 products, 8 loads, a fetch and 3 that count, in 20 vector
registers, of which none is spilled.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.gemv.main_loop import GemvOperands
from tinygrad_nv.cpu.gemm.schedules import CPUGemv
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.tile.gemm.spec import GemmSpec

FEWEST_ROWS = 9        # fewer wait for memory, whatever the loop
PAIR_ROWS = 64         # of a, at most: with more, packed operands are as fast …
FEW_ROWS = 16          # … and from here on where columns of b lie at multiples of SAME_SETS
ROWS = 4               # rows, and columns, whose sums are in registers
AHEAD = 2              # groups of columns that are fetched ahead
ROW_BLOCK = 16         # rows of a that stay in the first cache
SAME_SETS = 2048       # bytes: what lies at multiples of that shares few of the first cache's sets


def takes_pairs(spec: GemmSpec, pairs: bool) -> bool:
    """Whether a product whose operands are pairs is summed so."""
    return pairs and spec.m >= FEWEST_ROWS and spec.a.dtype == spec.b.dtype


def most_rows(spec: GemmSpec) -> int:
    """Returns the number of rows up to which this is the fastest way."""
    return FEW_ROWS if spec.b.mn * spec.b.dtype.itemsize % SAME_SETS == 0 else PAIR_ROWS


def reads_in_place(spec: GemmSpec) -> bool:
    """Whether rows of a are read where they lie."""
    return spec.a.k == 1 and not spec.symbolic and spec.a.mn * spec.a.dtype.itemsize % SAME_SETS != 0


def functions(o: GemvOperands, schedule: CPUGemv) -> str:
    """Returns the C functions of a tile of `ROWS` rows, and of the rows that are left."""
    last = o.spec.m % ROWS
    return _tile(o, schedule, ROWS) + (_tile(o, schedule, last) if last else "")


def _tile(o: GemvOperands, schedule: CPUGemv, rows: int) -> str:
    spec, pitch = o.spec, _pitch(o)
    names = [f"s{i}_{j}" for i in range(rows) for j in range(ROWS)]
    shares = range(_fetches(spec.m))
    fetch = " ".join(f"__builtin_prefetch(ahead + {i * spec.b.mn} + k, 0, 3);" for i in shares)

    def step(load: str, left: str) -> str:
        out = [f"const vi v{j} = {load}(w{j} + k{left});" for j in range(ROWS)]
        for i in range(rows):
            dots = [f"s{i}_{j} = dot_pairs(s{i}_{j}, v{j}, y);" for j in range(ROWS)]
            out.append(f"{{ const vi y = {load}(a + {i * pitch} + k{left}); {' '.join(dots)} }}")
        return " ".join(out)
    tail = spec.k % o.step
    rest = f"if (left) {{ const s64 k = steps * {o.step}; {step('load_n_pairs', ', left')} }}" if tail else ""
    columns = [f"*w{j} = b + (most < {j} ? most : {j}) * (s64){spec.b.mn}" for j in range(ROWS)]
    row = up(schedule.block_n, o.isa.lanes)
    stores = " ".join(f"{{ vf4 *q = (vf4 *)(to + {i * row}); *q = first ? t{i} : *q + t{i}; }}"
                      for i in range(rows))
    lanes = ", ".join((names + ["s0_0"] * o.isa.lanes)[:o.isa.lanes])
    quarters = " ".join(f"const vf4 t{i} = __builtin_shufflevector(t, t, "
                        f"{', '.join(str(ROWS * i + j) for j in range(ROWS))});" for i in range(rows))
    return f"""
NOINLINE void dots_{rows}(const u16 *a, const u16 *b, s64 most, const u16 *ahead, s64 steps, s64 left,
                    float *to, int first) {{
  const u16 {', '.join(columns)};
  vf {', '.join(f'{name} = (vf)0' for name in names)};
  for (s64 k = 0; k < steps * {o.step}; k += {o.step}) {{ {fetch} {step('load_pairs', '')} }}
  {rest}
  const vf t = sum16_({lanes});
  {quarters}
  {stores}
}}"""


def _pitch(o: GemvOperands) -> int: return o.spec.a.mn if o.direct else o.width


def _fetches(m: int) -> int:
    """Columns that a tile fetches: all tiles of a block together fetch `ROWS`."""
    return -(-ROWS // -(-min(m, ROW_BLOCK) // ROWS))


def sums_of_pairs(o: GemvOperands, schedule: CPUGemv) -> str:
    """C for a b whose rows lie along k."""
    spec, block_k, last = o.spec, schedule.block_k or o.spec.k, o.spec.m % ROWS
    column, group, shares = spec.b.mn, AHEAD * ROWS, _fetches(spec.m)
    to = f"sums[p * {spec.m} + i] + c"
    call = f"(x, w, count - c - 1, w + ahead + share * {column}ll, steps, left, {to}, !k0);"
    tile = f"dots_{ROWS}{call}"
    if last: tile = f"if (i + {ROWS} <= {spec.m}) {tile} else dots_{last}{call}"
    return f"""{{
      const s64 all = (count + {ROWS - 1}) / {ROWS} * {ROWS};
      for (s64 k0 = 0; k0 < {spec.k}; k0 += {block_k}) for (s64 i0 = 0; i0 < {spec.m}; i0 += {ROW_BLOCK}) {{
        const s64 deep = {spec.k} - k0 < {block_k} ? {spec.k} - k0 : {block_k};
        const s64 steps = deep / {o.step}, left = deep % {o.step};
        // behind the chunk's last columns: the first of its next block of k, or of the next chunk
        const s64 next = k0 + {block_k} < {spec.k} ? {block_k} - all * {column} : -k0;
        for (s64 p = 0; p < {spec.parts}; p++) for (s64 c = 0; c < count; c += {ROWS}) {{
          const u16 *w = {o.b(0, ("p", spec.part), ("(n0 + c)", column), ("k0", 1))};
          const s64 ahead = {group * column} + (c + {group} < count ? 0 : next);
          for (s64 i = i0, t = 0; i < i0 + {ROW_BLOCK} && i < {spec.m}; i += {ROWS}, t++) {{
            const s64 share = t * {shares} < {ROWS - shares} ? t * {shares} : {ROWS - shares};
            const u16 *x = {o.row("i")} + k0;
            {tile}
          }}
        }}
      }}
    }}"""
