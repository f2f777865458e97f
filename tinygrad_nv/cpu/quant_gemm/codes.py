"""Rows of int8 codes times the codes of a matrix in tiles, in integers.

Protocol: activations were quantised before (`QuantGemmSpec.codes`). A vector of 32-bit lanes is four columns
of as many outputs of a tile (quant/types.py), and four codes of a row are spread over its lanes:

    start[i] = −128 Σ a[i]                            bytes w + 128 have no sign
    for each tile of a part, W outputs at a time
      for `rows` rows of a at a time
        c = start + Σ (w + 128) a                     vpdpbusd over all of K, exact integers
    out = epilogue(c)

Sums are int32 and wrap as it does: the result is that of signed codes, in any order. So it is the same on
every instruction set and for every number of parts.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.gemv.kernel import epilogue
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.quant_gemm import byte_dots, decode, tiles
from tinygrad_nv.cpu.quant_gemm.dots import tall
from tinygrad_nv.cpu.quant_gemm.schedules import CodesDots
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

FEW, PARTS = 16, 2          # of so many rows a is little work, and there are PARTS for each thread
CHAINS = 4                  # sums side by side: the latency of vpdpbusd
BYTES_OF_PART = 64 << 10    # of codes; waking a thread takes as long as reading so much


def problems(spec: QuantGemmSpec, s: CodesDots) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    out = untaken(spec)
    return out if out or s.rows else ["rows 0"]


def untaken(spec: QuantGemmSpec) -> list[str]:
    """Why codes are not multiplied, whatever the schedule."""
    out = tiles.problems(spec, codes=True)
    if spec.gemm.a.k != 1: out.append(f"columns of a {spec.gemm.a.k} elements apart")
    return out


def default(spec: QuantGemmSpec, target: CPU) -> CodesDots:
    """The default schedule."""
    gemm, threads = spec.gemm, target.threads
    most = 1 if threads == 1 else threads * PARTS if gemm.m <= FEW else threads
    parts = max(1, min(most, gemm.n * gemm.k * gemm.m // BYTES_OF_PART, -(-gemm.n // TILE)))
    return CodesDots(target.isa, parts, min(gemm.m, target.isa.registers * 3 // 8))


def build(spec: QuantGemmSpec, s: CodesDots) -> CPUKernel:
    """The kernel."""
    gemm, count = spec.gemm, -(-spec.gemm.n // TILE)
    own = up(4 * gemm.m * (TILE * gemm.parts + 1), 64)      # sums, and what they start with
    rows = "m" if gemm.symbolic else str(gemm.m)
    body = f"""
  {decode.declare_matrix(spec.buffers)}
  s32 (*sums)[{TILE}] = (s32 (*)[{TILE}])((u8 *)work + core_id * {own}ll);
  s32 *start = (s32 *)(sums + {gemm.parts * gemm.m});
  a += {gemm.a.offset};
  for (s64 i = 0; i < {rows}; i++) start[i] = -128 * total_(a + i * {gemm.a.mn}ll);
  const s64 end = (s64)(core_id + 1) * {count} / {s.parts};
  for (s64 t = (s64)core_id * {count} / {s.parts}; t < end; t++) {{
    const s64 n0 = t * {TILE};
    const s64 count = {gemm.n} - n0 < {TILE} ? {gemm.n} - n0 : {TILE};
    for (s64 p = 0; p < {gemm.parts}; p++) for (s64 lane = 0; lane < {TILE}; lane += W) {{
      s64 i = 0;
      {_calls(spec, s, rows)}
    }}
    {epilogue(gemm)}
  }}"""
    inputs = [("s8", "a"), *decode.pointers(spec.buffers),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), decode.struct(spec.buffers), byte_dots.functions(s.isa),
              _total(gemm.k), *(_main_loop(spec, s.isa, each) for each in tall(spec, s.rows))]
    return kernel(f"codes_dots_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


def _total(k: int) -> str:
    """The function of a row's sum."""
    return f"""
NOINLINE s32 total_(const s8 *restrict row) {{
  vi sum = (vi)0;
  for (s64 k = 0; k < {k}; k += W) sum += load_s8(row + k);
  return sum_i(sum);
}}"""


def _calls(spec: QuantGemmSpec, s: CodesDots, rows: str) -> str:
    gemm = spec.gemm
    given = f"w, p * {-(-gemm.n // TILE)} + t, lane, a + i * {gemm.a.mn}ll, start + i, " \
            f"sums[p * {gemm.m} + i] + lane"
    return "\n      ".join(f"for (; i + {each} <= {rows}; i += {each}) dots_{each}({given});"
                           for each in tall(spec, s.rows))


def _main_loop(spec: QuantGemmSpec, isa: ISA, rows: int) -> str:
    """The main loop of so many rows of a."""
    chains, quads = max(1, CHAINS // rows), INT8_BLOCK // 4
    sums = {r: [f"c{r}_{c}" for c in range(chains)] for r in range(rows)}
    begin = " ".join(f"vi {name} = {'(vi)0' if c else f'(vi)start[{r}]'};"
                     for r, names in sums.items() for c, name in enumerate(names))
    lines = tiles.loads(spec, INT8_BLOCK, 0) + tiles.quads(spec, INT8_BLOCK, 0)
    for i in range(quads):
        lines += [_dot(isa, names[i % chains], f"y{i}", f"a + k + {r * spec.gemm.a.mn + 4 * i}ll")
                  for r, names in sums.items()]
    inner = "\n    ".join(lines)
    ends = " ".join(f"*(vi_u *)(to + {r * TILE}) = {' + '.join(names)};" for r, names in sums.items())
    return f"""
NOINLINE void dots_{rows}(matrix w, s64 t, s64 lane, const s8 *restrict a, const s32 *restrict start,
                          s32 *restrict to) {{
  {begin}
  for (s64 k = 0; k < {spec.gemm.k}; k += {INT8_BLOCK}) {{
    {inner}
  }}
  {ends}
}}"""


def _dot(isa: ISA, to: str, free: str, place: str) -> str:
    """C that adds four columns' products. In 16 bits the upper bit is multiplied apart: there two products of
    bytes do not fit, and −128 has no sign to give."""
    if not byte_dots.in_shorts(isa): return f"{to} = dots_({to}, {free}, {place});"
    a = f"(vi)*(const quad_u *)({place})"
    halves = ("0x7f7f7f7f", "(s32)0x80808080")
    return " ".join(f"{to} = four_({to}, two_({free} & {half}, {a}));" for half in halves)
