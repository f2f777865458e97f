"""Many quantised rows times a matrix in tiles: dot products of bytes by AMX tiles.

Protocol: a tile of the matrix (quant/types.py) is operand b of TDPB..D as it lies, where codes have 8 bits;
of fewer bits they become bytes with a sign, less shift and zero, once for each block of rows. Rows are
quantised (rows.py) 16 side by side, so that a step of them is operand a.

    for each block of block_m rows of a part
      quantise them
      for each tile of 16 outputs
        codes -> bytes, of all K                                  fewer than 8 bits
        for each strip of 16 rows                                 totals in 16 registers
          for each step of K
            c = Σ v q                                             one tdpb..d, exact integers
            total += d (scale (c − zero Σq) − min Σq)             float32, an output a lane
      out = epilogue(totals)

A step has one scale of the matrix and one of a: 32 columns, or 16, half or a fourth of what a tile holds.
Numbers are those of dots.py, and are added in the same order. The matrix's bytes stay in the second cache for
all strips of a block, and so do a block's rows for all outputs.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.amx import FEWEST_ROWS, finish
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.quant_gemm import decode, rows, tiles
from tinygrad_nv.cpu.quant_gemm.schedules import QuantAmx
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

STRIP = 16                  # rows of operand a
PARTS = 4                   # for each thread, so that one that is held up does less
TILES_OF_PART = 32          # fewer take less time than quantising a part's rows


def problems(spec: QuantGemmSpec, s: QuantAmx) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    out, type = tiles.problems(spec), spec.type
    if s.isa.level != "amx": out.append(f"no tiles on {s.isa}")
    if not spec.int8: out.append("activations that are not quantised")
    if spec.gemm.m < FEWEST_ROWS: out.append(f"{spec.gemm.m} rows, at least {FEWEST_ROWS}")
    if type.bits < 8 and (reach := tiles.shift(type) + (type.zeros << type.bits)) > 128:
        out.append(f"codes less up to {reach}, at most 128")
    if not s.block_m or s.block_m % STRIP:
        out.append(f"block_m {s.block_m}, a multiple of {STRIP} is needed")
    return out


def default(spec: QuantGemmSpec, target: CPU) -> QuantAmx:
    """The default schedule: rows of a block take half of the second cache."""
    gemm, threads = spec.gemm, target.threads
    most = max(STRIP, min(1024, target.l2_bytes // 2 // gemm.k))
    block_m = up(-(-gemm.m // -(-gemm.m // most)), STRIP)
    items = -(-gemm.m // block_m) * -(-gemm.n // TILE)
    parts = 1 if threads == 1 else min(items, max(threads, min(threads * PARTS, items // TILES_OF_PART)))
    return QuantAmx(target.isa, parts, block_m)


def build(spec: QuantGemmSpec, s: QuantAmx) -> CPUKernel:
    """The kernel."""
    gemm, k = spec.gemm, spec.gemm.k
    panel = k * TILE if spec.type.bits < 8 else 0
    steps, blocks = k // tiles.step_of(spec.type), k // INT8_BLOCK
    # of a part: totals; bytes of a tile; bytes, scales, sums as numbers and times the shift of a block's rows
    own = s.block_m * (4 * TILE * gemm.parts + k + 4 * blocks + 8 * steps) + panel
    own = up(own, 64)
    across = -(-gemm.n // TILE)
    body = f"""
  {decode.declare_matrix(spec.buffers)}
  u8 *own = (u8 *)work + core_id * {own}ll;
  float (*sums)[{s.block_m}][{TILE}] = (float (*)[{s.block_m}][{TILE}])own;
  s8 *q = (s8 *)(sums + {gemm.parts}), *bytes = q + {s.block_m * k};
  float *d = (float *)(bytes + {panel}), *sq = d + {s.block_m * blocks};
  s32 *start = (s32 *)(sq + {s.block_m * steps});
  const s64 every = {'m' if gemm.symbolic else gemm.m}, down = (every + {s.block_m - 1}) / {s.block_m};
  const s64 items = down * {across};
  tiles_begin();
  const s64 end = items * (core_id + 1) / {s.parts};
  for (s64 item = items * core_id / {s.parts}, before = -1; item < end; item++) {{
    const s64 m0 = item / {across} * {s.block_m}, t = item % {across}, n0 = t * {TILE};
    const s64 rows = every - m0 < {s.block_m} ? every - m0 : {s.block_m};
    const s64 columns = {gemm.n} - n0 < {TILE} ? {gemm.n} - n0 : {TILE};
    if (m0 != before) {{ before = m0; {_quantise_rows(spec, steps, blocks)} }}
    for (s64 p = 0; p < {gemm.parts}; p++) {{
      const s64 of = p * {across} + t;
      {'unpack_(w, of, bytes);' if panel else f'const s8 *bytes = (const s8 *)w.codes + of * {k * TILE}ll;'}
      for (s64 i = 0; i < rows; i += {STRIP})
        dots_(w, of, bytes, q + i * {k}, d + i * {blocks}, sq + i * {steps}, sums[p] + i);
    }}
    for (s64 i = 0; i < rows; i++) for (s64 j = 0; j < columns; j += W) {{ {finish(gemm)} }}
  }}
  tiles_end();"""
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.buffers),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), f"#define TILE_UNITS {tiles.step_of(spec.type) // 4}", header("amx.h"),
              decode.struct(spec.buffers), tiles.functions(spec.type), rows.functions(spec, STRIP),
              _unpack(spec) if panel else "", _main_loop(spec)]
    return kernel(f"quant_amx_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


def _quantise_rows(spec: QuantGemmSpec, steps: int, blocks: int) -> str:
    """C that quantises the rows of a block: row i is row i % 16 of its strip."""
    a, k, step = spec.gemm.a, spec.gemm.k, tiles.step_of(spec.type)
    order = "order" if spec.type.permuted else "0"
    strip = f"i / {STRIP} * {STRIP}"
    sums = f"{strip} * {steps} + i % {STRIP}"
    return f"""for (s64 i = 0; i < rows; i++)
      quantise_(a + {a.offset} + (m0 + i) * {a.mn}ll, {order}, q + {strip} * {k} + i % {STRIP} * {step},
                d + {strip} * {blocks} + i % {STRIP}, sq + {sums}, start + {sums});"""


def _unpack(spec: QuantGemmSpec) -> str:
    """The function that makes bytes of a tile's codes, less shift and zero."""
    step, lines = tiles.step_of(spec.type), []
    for at in range(0, INT8_BLOCK, step):
        lines.append(f"{{ const s64 k = at + {at};")
        less = [str(tiles.shift(spec.type))] if tiles.shift(spec.type) else []
        if spec.type.zeros: less.append(tiles.zeros(spec))
        lines += tiles.loads(spec, step, at) + tiles.quads(spec, step, at)
        if less: lines.append(f"const vb64 less = (vb64)(({' + '.join(less)}) * (vi)0x01010101);")
        lines += [f"*(vi_u *)(to + (k + {4 * quad}) * {TILE}) = "
                  f"{f'(vi)((vb64)y{quad} - less)' if less else f'y{quad}'};" for quad in range(step // 4)]
        lines.append("}")
    inner = "\n    ".join(lines)
    return f"""
typedef VECTOR(u8, 64) vb64;
NOINLINE void unpack_(matrix w, s64 t, s8 *to) {{
  const s64 lane = 0;
  for (s64 b = 0; b < {spec.gemm.k // INT8_BLOCK}; b++) {{
    const s64 at = b * {INT8_BLOCK};
    {inner}
  }}
}}"""


def _main_loop(spec: QuantGemmSpec) -> str:
    """The function of 16 rows and 16 outputs."""
    type, k, step = spec.type, spec.gemm.k, tiles.step_of(spec.type)
    kind = "bsud" if type.bits == 8 and not tiles.is_signed(type) else "bssd"
    factors = tiles.factors(spec, type.element.lsb)
    less = _less(spec)
    names, inner = [f"total{r}" for r in range(STRIP)], []
    for at in range(0, INT8_BLOCK, step):
        inner.append(f"{{ const s64 k = at + {at};")
        inner.append(f"tile_zero(0); tile_load(4, q + k * {STRIP}, {step});")
        inner.append(f"tile_load(6, bytes + k * {TILE}, 64);")
        inner.append(f"tile_dot({kind}, 0, 4, 6); tile_store(0, c, 64);")
        inner += [f"const vf {name} = {text};" for name, text in factors.items() if name != "zero" or less]
        if less: inner.append(f"const vf less = {less};")
        for r, name in enumerate(names):
            sums, value = f"sq[k / {step} * {STRIP} + {r}]", f"to_f(*(const vi *)c[{r}])"
            if less: value = f"({value} - less * {sums})"
            value = f"{value} * scale"
            if type.mins: value = f"({value} - low * {sums})"
            inner.append(f"{name} = fma_({value}, (vf)d[b * {STRIP} + {r}], {name});")
        inner.append("}")
    lines = "\n    ".join(inner)
    return f"""
NOINLINE void dots_(matrix w, s64 t, const s8 *bytes, const s8 *q, const float *d, const float *sq,
                    float (*to)[{TILE}]) {{
  TILES;
  s32 c[{STRIP}][{TILE}] __attribute__((aligned(64)));
  const s64 lane = 0;
  {' '.join(f'vf {name} = (vf)0.f;' for name in names)}
  for (s64 b = 0; b < {k // INT8_BLOCK}; b++) {{
    const s64 at = b * {INT8_BLOCK};
    {lines}
  }}
  {' '.join(f'store_f32(to[{r}], {name}{tiles.last(spec)});' for r, name in enumerate(names))}
}}"""


def _less(spec: QuantGemmSpec) -> str:
    """C of what bytes of an output are too large by, "" for nothing. Codes of 8 bits are not unpacked."""
    if spec.type.bits < 8: return ""
    return " + ".join([*["zero"] * spec.type.zeros, *[f"{spec.type.shift}.f"] * bool(spec.type.shift)])
