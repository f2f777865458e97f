"""Rows times a matrix in tiles: dot products of bytes, or of float32 numbers.

Protocol: the matrix lies in tiles (quant/types.py), so that a vector of 32-bit lanes is four columns of as
many outputs, and a row of a is spread over the lanes. Each part first brings a into its share of the
workspace.
A step is as many columns as have one scale, 16 or 32:

    for each tile of a part, W outputs at a time
      for `rows` rows of a at a time
        for each step of K
          codes without a sign, v, from all planes
          c = Σ v q − shift Σq                          vpdpbusd, exact integers
          total += d (scale (c − zero Σq) − min Σq)     float32
    out = epilogue(totals)

That is of activations that are quantised as the spec says, bytes q with a scale d for each block of 32 and
the sum Σq of each step; many are multiplied with panels of codes (byte_panels.py). Others are widened, and
multiplied with numbers of float32 (columns.py), or stay pairs of bfloat16 (pairs.py):

          total += scale Σ x (v − shift − zero)         of all columns of a scale
          total += x (scale v − min)                    with minima

Integers are the same on every instruction set. Totals are added in the order of k; sums of few rows of
float32 are `CHAINS` that take turns.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.gemv.kernel import epilogue
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.quant_gemm import byte_dots, byte_panels, columns, decode, pairs, rows, tiles
from tinygrad_nv.cpu.quant_gemm.schedules import QuantDots
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

FEW, PARTS = 16, 2          # of so many rows a is little work, and there are PARTS for each thread
CHAINS = 4                  # sums side by side: the latency of a multiplication and addition
# blocks of codes that are fetched ahead. On 2 cores of a Xeon (AMX, 105 MB of L3) decode of a model of 38M
# parameters is 1.13 to 1.23 (q8_0) and 1.05 (q4_K_M) times as fast; 16 blocks gain 1.09 and nothing
AHEAD, LINE = 8, 64         # LINE: bytes
BYTES_OF_PART = 64 << 10    # of codes; waking a thread takes as long as reading so much


def problems(spec: QuantGemmSpec, s: QuantDots) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    out = tiles.problems(spec)
    return out if out or s.rows else ["rows 0"]


def default(spec: QuantGemmSpec, target: CPU) -> QuantDots:
    """The default schedule."""
    gemm, threads = spec.gemm, target.threads
    nbytes = gemm.n * gemm.k * spec.type.bits // 8 * gemm.m
    most = 1 if threads == 1 else threads * PARTS if gemm.m <= FEW else threads
    parts = max(1, min(most, nbytes // BYTES_OF_PART, -(-gemm.n // TILE)))
    return QuantDots(target.isa, parts, min(gemm.m, target.isa.registers // 4))


def build(spec: QuantGemmSpec, s: QuantDots) -> CPUKernel:
    """The kernel."""
    gemm, k = spec.gemm, spec.gemm.k
    count, steps, blocks = -(-gemm.n // TILE), k // tiles.step_of(spec.type), k // INT8_BLOCK
    # of a part: totals; bytes, scales, sums as numbers and times the shift, or a in float32
    own = gemm.m * (4 * TILE * gemm.parts + (k + 4 * blocks + 8 * steps if spec.int8 else 4 * k))
    own = -(-own // 64) * 64
    count_m = "m" if gemm.symbolic else str(gemm.m)
    many = spec.int8 and gemm.m >= byte_panels.FEWEST_ROWS
    panels = f"""if ({count_m} >= {byte_panels.FEWEST_ROWS})
        panels_(w, p * {count} + t, {count_m}, q, d, sq, start, sums + p * {gemm.m}); else""" if many else ""
    body = f"""
  {decode.declare_matrix(spec.buffers)}
  u8 *own = (u8 *)work + core_id * {own}ll;
  float (*sums)[{TILE}] = (float (*)[{TILE}])own;
  float *d = (float *)(sums + {gemm.parts * gemm.m});
  {_prologue(spec, s.isa, count_m)}
  const s64 end = (s64)(core_id + 1) * {count} / {s.parts};
  for (s64 t = (s64)core_id * {count} / {s.parts}; t < end; t++) {{
    const s64 n0 = t * {TILE};
    const s64 count = {gemm.n} - n0 < {TILE} ? {gemm.n} - n0 : {TILE};
    for (s64 p = 0; p < {gemm.parts}; p++) {{
      {panels}
      for (s64 lane = 0; lane < {TILE}; lane += W) {{ s64 i = 0; {_calls(spec, s, count_m)} }}
    }}
    {epilogue(gemm)}
  }}"""
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.buffers),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), decode.struct(spec.buffers),
              byte_dots.functions(s.isa), tiles.functions(spec.type),
              *row_functions(spec, s.isa),
              *(main_loop(spec, s.isa, each) for each in tall(spec, s.rows)),
              byte_panels.functions(spec, s.isa) if many else ""]
    return kernel(f"quant_dots_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


# **** rows of a ****

def row_functions(spec: QuantGemmSpec, isa: ISA) -> list[str]:
    """The functions of rows, and of what they are multiplied with."""
    if pairs.takes(spec, isa): return [pairs.functions(spec)]
    return [rows.functions(spec), *([] if spec.int8 else [columns.functions(spec.type, isa)])]


def _prologue(spec: QuantGemmSpec, isa: ISA, count: str) -> str:
    """C that brings a into the workspace, behind the totals."""
    m, k, a = spec.gemm.m, spec.gemm.k, spec.gemm.a
    steps, blocks = k // tiles.step_of(spec.type), k // INT8_BLOCK
    row = f"a + {a.offset} + i * {a.mn}ll, {'order' if spec.type.permuted else '0'}"
    if pairs.takes(spec, isa):
        runs = k // tiles.run_of(spec.type, k)
        return f"""u16 *x = (u16 *)(d + {m * runs});
  for (s64 i = 0; i < {count}; i++) arrange_({row}, x + i * {k}, d + i * {runs});"""
    if not spec.int8: return f"for (s64 i = 0; i < {count}; i++) widen_({row}, d + i * {k});"
    return f"""float *sq = d + {m * blocks};
  s32 *start = (s32 *)(sq + {m * steps});
  s8 *q = (s8 *)(start + {m * steps});
  for (s64 i = 0; i < {count}; i++)
    quantise_({row}, q + i * {k}, d + i * {blocks}, sq + i * {steps}, start + i * {steps});"""


# **** the main loop ****

def tall(spec: QuantGemmSpec, rows: int) -> list[int]:
    """How many rows the main loops have, at most `rows`, the largest first."""
    if spec.gemm.symbolic: return heights(rows)
    rest = spec.gemm.m % rows
    return [rows, *[rest] * (rest > 0)]


def heights(rows: int) -> list[int]:
    """The same where the number of rows is not known."""
    return [1 << i for i in range(rows.bit_length())][::-1]


def of_rows(spec: QuantGemmSpec, isa: ISA) -> str:
    """C of what main loops take of rows from i on."""
    k, step = spec.gemm.k, tiles.step_of(spec.type)
    if spec.int8:
        return f"q + i * {k}, d + i * {k // INT8_BLOCK}, sq + i * {k // step}, start + i * {k // step}"
    return f"x + i * {k}, d + i * {k // tiles.run_of(spec.type, k)}" if pairs.takes(spec, isa) else \
        f"d + i * {k}"


def _calls(spec: QuantGemmSpec, s: QuantDots, rows: str) -> str:
    gemm, given = spec.gemm, of_rows(spec, s.isa)
    return "\n      ".join(f"for (; i + {each} <= {rows}; i += {each}) "
                           f"dots_{each}(w, p * {-(-gemm.n // TILE)} + t, lane, {given}, "
                           f"sums[p * {gemm.m} + i] + lane);" for each in tall(spec, s.rows))


def main_loop(spec: QuantGemmSpec, isa: ISA, rows: int) -> str:
    """The main loop of so many rows of a."""
    of_a = "const float *restrict x"
    if pairs.takes(spec, isa): of_a = "const u16 *restrict x, const float *sx"
    if spec.int8: of_a = "const s8 *restrict q, const float *restrict d, const float *sq, const s32 *start"
    totals = [f"total{r}" for r in range(rows)]
    stores = " ".join(f"store_f32(to + {r * TILE}, {total}{tiles.last(spec)});"
                      for r, total in enumerate(totals))
    return f"""
NOINLINE void dots_{rows}(matrix w, s64 t, s64 lane, {of_a}, float *restrict to) {{
  {_zeros(totals)}
  {_loop(spec, isa, rows)}
  {stores}
}}"""


def _loop(spec: QuantGemmSpec, isa: ISA, rows: int) -> str:
    """C that adds to totals."""
    if spec.int8: return _bytes(spec, isa, rows)
    chains = max(1, CHAINS // rows)
    if pairs.takes(spec, isa): return pairs.main_loop(spec, rows, chains)
    return _numbers(spec, isa, rows, chains)


def _zeros(names: list[str]) -> str: return " ".join(f"vf {name} = (vf)0.f;" for name in names)


def _bytes(spec: QuantGemmSpec, isa: ISA, rows: int) -> str:
    """C of bytes: for each block the steps in it."""
    type, k, step = spec.type, spec.gemm.k, tiles.step_of(spec.type)
    steps, blocks = k // step, k // INT8_BLOCK
    begin = "(vi)start[s + {}]" if tiles.shift(type) and not byte_dots.has_sign_in_a(type, isa) else "(vi)0"
    out = _fetches(spec, isa, rows)
    for at in range(0, INT8_BLOCK, step):
        out.append(f"{{ const s64 k = at + {at}, s = k / {step};")
        out += [f"const vf {name} = {text};" for name, text in tiles.factors(spec, type.element.lsb).items()]
        out += tiles.loads(spec, step, at) + tiles.quads(spec, step, at)
        out += [f"vi c{r} = {begin.format(r * steps)};" for r in range(rows)]
        out += byte_dots.products(type, isa, step, rows, "q + k", k)
        sums = (byte_dots.scale_sum(type, f"c{r}", f"sq[s + {r * steps}]") for r in range(rows))
        out += [f"total{r} = fma_({value}, (vf)d[b + {r * blocks}], total{r});"
                for r, value in enumerate(sums)]
        out.append("}")
    lines = "\n    ".join(out)
    return f"""for (s64 b = 0; b < {blocks}; b++) {{
    const s64 at = b * {INT8_BLOCK};
    {lines}
  }}"""


def _fetches(spec: QuantGemmSpec, isa: ISA, rows: int) -> list[str]:
    """C that fetches the codes of the block `AHEAD` blocks later, of one row: more wait less for memory.
    Past the end of the matrix a prefetch does nothing."""
    if rows > 1 or isa.lanes != TILE: return []
    out = []
    for name, bits, _ in tiles.planes(spec):
        column = TILE * bits // 8
        block = f"(const u8 *)w.{name} + (t * {spec.gemm.k}ll + at) * {column}"
        out += [f"__builtin_prefetch({block} + {AHEAD * INT8_BLOCK * column + line});"
                for line in range(0, INT8_BLOCK * column, LINE)]
    return out


def _numbers(spec: QuantGemmSpec, isa: ISA, rows: int, chains: int) -> str:
    """C of numbers. Columns of one scale are summed before they are multiplied with it; with minima each is
    dequantised."""
    type, k = spec.type, spec.gemm.k
    sums = {r: [f"s{r}_{c}" for c in range(chains)] for r in range(rows)}
    zeros = _zeros([name for each in sums.values() for name in each])
    factors = [f"const vf {name} = {text};"
               for name, text in tiles.factors(spec, columns.scale_factor(type, isa)).items()]
    step, run = tiles.step_of(type), tiles.run_of(type, k)
    scaled = " ".join(f"total{r} = fma_({' + '.join(each)}, scale, total{r});" for r, each in sums.items())
    plain = " ".join(f"total{r} = {' + '.join(each)};" for r, each in sums.items())

    def block(before: list[str], after: str) -> str:
        lines = []
        for at in range(0, INT8_BLOCK, step):
            lines += [f"{{ const s64 k = at + {at};", *before]
            more, values = columns.step(spec, isa, step, at)
            lines += more
            for column, value in enumerate(values):
                lines.append(f"{{ const vf v = {value}{' * scale - low' if type.mins else ''};")
                lines += [f"{each[column % chains]} = fma_(v, (vf)x[k + {r * k + column}], "
                          f"{each[column % chains]});" for r, each in sums.items()]
                lines.append("}")
            lines += [after, "}"]
        return "\n    ".join(lines)
    if type.mins:
        return f"{zeros} for (s64 at = 0; at < {k}; at += {INT8_BLOCK}) {{ {block(factors, '')} }} {plain}"
    if run < INT8_BLOCK:
        return f"for (s64 at = 0; at < {k}; at += {INT8_BLOCK}) {{ {block([*factors, zeros], scaled)} }}"
    # the last columns may be fewer than have one scale
    return f"""for (s64 k = 0; k < {k}; k += {run}) {{
    {' '.join(factors)} {zeros}
    for (s64 at = k; at < k + {run}{f' && at < {k}' if k % run else ''}; at += {INT8_BLOCK}) {{
    {block([], '')}
    }}
    {scaled}
  }}"""
