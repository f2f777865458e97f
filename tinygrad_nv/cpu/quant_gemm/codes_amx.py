"""Many rows of int8 codes times the codes of a matrix in tiles, by AMX tiles.

Protocol: a tile of the matrix (quant/types.py) is operand b of TDPBSSD as it lies, `STEP` columns of it at a
time. Rows of a are brought into the workspace, 16 of them and a step side by side, which is operand a; zeros
stand for rows that are not there.

    for each block of block_m rows of a part
      a -> q
      for each two tiles of 16 outputs
        for each strip of 32 rows
          c[2][2] = Σ q w over all of K                         4 tiles, 4 loads for 4 tdpbssd, exact integers
      out = epilogue(c)

The result is that of codes.py, bit for bit.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.amx import FEWEST_ROWS, finish
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.quant_gemm import codes, decode
from tinygrad_nv.cpu.quant_gemm.schedules import CodesAmx
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

HALF, STRIP = 16, 32        # rows of operand a, and of two
PARTS = 4                   # for each thread, so that one that is held up does less
PAIRS_OF_PART = 16          # fewer take less time than copying a part's rows


def problems(spec: QuantGemmSpec, s: CodesAmx) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    out = codes.untaken(spec)
    if s.isa.level != "amx": out.append(f"no tiles on {s.isa}")
    if spec.gemm.m < FEWEST_ROWS: out.append(f"{spec.gemm.m} rows, at least {FEWEST_ROWS}")
    if not s.block_m or s.block_m % STRIP:
        out.append(f"block_m {s.block_m}, a multiple of {STRIP} is needed")
    return out


def default(spec: QuantGemmSpec, target: CPU) -> CodesAmx:
    """The default schedule: rows of a block take half of the second cache."""
    gemm, threads = spec.gemm, target.threads
    most = max(STRIP, min(1024, target.l2_bytes // 2 // gemm.k))
    block_m = up(-(-gemm.m // -(-gemm.m // most)), STRIP)
    items = -(-gemm.m // block_m) * _across(spec)
    parts = 1 if threads == 1 else min(items, max(threads, min(threads * PARTS, items // PAIRS_OF_PART)))
    return CodesAmx(target.isa, parts, block_m)


def _across(spec: QuantGemmSpec) -> int: return -(-spec.gemm.n // (2 * TILE))


def _step(spec: QuantGemmSpec) -> int:
    """Columns of an operand of one instruction."""
    return 32 if spec.gemm.k % 64 else 64


def build(spec: QuantGemmSpec, s: CodesAmx) -> CPUKernel:
    """The kernel."""
    gemm, k, across, count = spec.gemm, spec.gemm.k, _across(spec), -(-spec.gemm.n // TILE)
    own = s.block_m * (4 * 2 * TILE * gemm.parts + k)       # sums, and a block's rows
    body = f"""
  {decode.declare_matrix(spec.buffers)}
  u8 *own = (u8 *)work + core_id * {own}ll;
  s32 (*sums)[{s.block_m}][{2 * TILE}] = (s32 (*)[{s.block_m}][{2 * TILE}])own;
  s8 *q = (s8 *)(sums + {gemm.parts});
  const s64 every = {'m' if gemm.symbolic else gemm.m}, down = (every + {s.block_m - 1}) / {s.block_m};
  const s64 items = down * {across};
  tiles_begin();
  const s64 end = items * (core_id + 1) / {s.parts};
  for (s64 item = items * core_id / {s.parts}, before = -1; item < end; item++) {{
    const s64 m0 = item / {across} * {s.block_m}, t = item % {across} * 2, n0 = t * {TILE};
    const s64 rows = every - m0 < {s.block_m} ? every - m0 : {s.block_m};
    const s64 columns = {gemm.n} - n0 < {2 * TILE} ? {gemm.n} - n0 : {2 * TILE};
    if (m0 != before) {{ before = m0; bring_(a + {gemm.a.offset} + m0 * {gemm.a.mn}ll, rows, q); }}
    for (s64 p = 0; p < {gemm.parts}; p++) {{
      const s8 *left = w.codes + (p * {count} + t) * {k * TILE}ll;
      const s8 *right = t + 1 < {count} ? left + {k * TILE} : left;
      for (s64 i = 0; i < rows; i += {STRIP}) dots_(q + i * {k}, left, right, sums[p] + i);
    }}
    for (s64 i = 0; i < rows; i++) for (s64 j = 0; j < columns; j += W) {{ {finish(gemm)} }}
  }}
  tiles_end();"""
    inputs = [("s8", "a"), *decode.pointers(spec.buffers),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), f"#define TILE_UNITS {_step(spec) // 4}", header("amx.h"),
              decode.struct(spec.buffers), _bring(spec), _main_loop(spec)]
    return kernel(f"codes_amx_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


def _bring(spec: QuantGemmSpec) -> str:
    """The function that copies a block's rows: a step of row i is line i % 16 of an operand."""
    k, step = spec.gemm.k, _step(spec)
    return f"""
typedef VECTOR(u8, {step}) line;
typedef line line_u __attribute__((aligned(1), may_alias));
NOINLINE void bring_(const s8 *restrict a, s64 rows, s8 *restrict q) {{
  for (s64 i = 0; i < (rows + {STRIP - 1}) / {STRIP} * {STRIP}; i++) for (s64 k = 0; k < {k}; k += {step})
    *(line_u *)(q + i / {HALF} * {HALF * k}ll + k * {HALF} + i % {HALF} * {step}) =
      i < rows ? *(const line_u *)(a + i * {spec.gemm.a.mn}ll + k) : (line)0;
}}"""


def _main_loop(spec: QuantGemmSpec) -> str:
    """The function of 32 rows and two tiles."""
    k, step = spec.gemm.k, _step(spec)
    zeros = " ".join(f"tile_zero({c});" for c in range(4))
    dots = " ".join(f"tile_dot(bssd, {c}, {4 + c // 2}, {6 + c % 2});" for c in range(4))
    stores = " ".join(f"tile_store({c}, to[{c // 2 * HALF}] + {c % 2 * TILE}, {4 * 2 * TILE});"
                      for c in range(4))
    return f"""
NOINLINE void dots_(const s8 *q, const s8 *left, const s8 *right, s32 (*to)[{2 * TILE}]) {{
  TILES;
  {zeros}
  for (s64 k = 0; k < {k}; k += {step}) {{
    tile_load(4, q + k * {HALF}, {step}); tile_load(5, q + (k + {k}) * {HALF}, {step});
    tile_load(6, left + k * {TILE}, 64); tile_load(7, right + k * {TILE}, 64);
    {dots}
  }}
  {stores}
}}"""
