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
the sum Σq of each step. Of others, which are widened, each element is dequantised in registers:

          total += x (scale (v − shift − zero) − min)

Integers are the same on every instruction set. Totals are added in the order of k; those of few rows of
float32 are `CHAINS` that take turns.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.gemv.kernel import epilogue
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.quant_gemm import decode, rows, tiles
from tinygrad_nv.cpu.quant_gemm.schedules import QuantDots
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

FEW, PARTS = 16, 2          # of so many rows a is little work, and there are PARTS for each thread
CHAINS = 8                  # sums side by side, more than the latency of a multiplication asks for
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
    gemm, (n, k) = spec.gemm, spec.shape
    count, steps, blocks = -(-gemm.n // TILE), k // tiles.step_of(spec.type), k // INT8_BLOCK
    # of a part: totals; bytes, scales, sums as numbers and times the shift, or a in float32
    own = gemm.m * (4 * TILE * gemm.parts + (k + 4 * blocks + 8 * steps if spec.int8 else 4 * k))
    own = -(-own // 64) * 64
    count_m = "m" if gemm.symbolic else str(gemm.m)
    body = f"""
  {decode.packed_of(spec.type, n, k)}
  u8 *own = (u8 *)work + core_id * {own}ll;
  float (*sums)[{TILE}] = (float (*)[{TILE}])own;
  float *d = (float *)(sums + {gemm.parts * gemm.m});
  {_prologue(spec, count_m)}
  const s64 end = (s64)(core_id + 1) * {count} / {s.parts};
  for (s64 t = (s64)core_id * {count} / {s.parts}; t < end; t++) {{
    const s64 n0 = t * {TILE};
    const s64 count = {gemm.n} - n0 < {TILE} ? {gemm.n} - n0 : {TILE};
    for (s64 p = 0; p < {gemm.parts}; p++) for (s64 lane = 0; lane < {TILE}; lane += W) {{
      s64 i = 0;
      {_calls(spec, s, count_m)}
    }}
    {epilogue(gemm)}
  }}"""
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.type, n, k),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), decode.struct(spec.type, n, k),
              f"#define CODE_BITS {spec.type.bits}", DOTS, rows.functions(spec),
              *(_main_loop(spec, each) for each in _tall(spec, s))]
    return kernel(f"quant_dots_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


# **** rows of a ****

def _prologue(spec: QuantGemmSpec, count: str) -> str:
    """C that brings a into the workspace, behind the totals."""
    m, k, a = spec.gemm.m, spec.gemm.k, spec.gemm.a
    steps, blocks = k // tiles.step_of(spec.type), k // INT8_BLOCK
    row = f"a + {a.offset} + i * {a.mn}ll, {'order' if spec.type.permuted else '0'}"
    if not spec.int8: return f"for (s64 i = 0; i < {count}; i++) widen_({row}, d + i * {k});"
    return f"""float *sq = d + {m * blocks};
  s32 *start = (s32 *)(sq + {m * steps});
  s8 *q = (s8 *)(start + {m * steps});
  for (s64 i = 0; i < {count}; i++)
    quantise_({row}, q + i * {k}, d + i * {blocks}, sq + i * {steps}, start + i * {steps});"""


# a quad of codes times a quad of a, which all lanes have
DOTS = """
typedef s32 quad_u __attribute__((aligned(1), may_alias));
#if HAVE_FMA
// by two products in 16 bits, which hold two of 128 · 127
INLINE vi pairs_(vi codes, vi x) {
  vi two, four;
  __asm__("vpmaddubsw %2, %1, %0" : "=v"(two) : "v"(codes), "v"(x));
  __asm__("vpmaddwd %2, %1, %0" : "=v"(four) : "v"(two), "v"((vi)0x00010001));
  return four;
}
#endif
INLINE vi dots_(vi c, vi codes, const s8 *q) {
#if HAVE_VNNI && AVX512
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(codes), "m"(*(const quad_u *)q));
  return c;
#elif HAVE_FMA && !HAVE_VNNI
  const vi x = (vi)*(const quad_u *)q;
  return CODE_BITS < 8 ? c + pairs_(codes, x) :
    c + pairs_(codes & 0x7f7f7f7f, x) + pairs_(codes & (s32)0x80808080, x);
#else
  return dot_quad(c, codes, (vi)*(const quad_u *)q);
#endif
}"""


# **** the main loop ****

def _tall(spec: QuantGemmSpec, s: QuantDots) -> list[int]:
    """How many rows the main loops have, the largest first."""
    if spec.gemm.symbolic: return [1 << i for i in range(s.rows.bit_length())][::-1]
    rest = spec.gemm.m % s.rows
    return [s.rows, *[rest] * (rest > 0)]


def _calls(spec: QuantGemmSpec, s: QuantDots, rows: str) -> str:
    gemm, made = spec.gemm, []
    blocks, steps = gemm.k // INT8_BLOCK, gemm.k // tiles.step_of(spec.type)
    of_a = f"q + i * {gemm.k}, d + i * {blocks}, sq + i * {steps}, start + i * {steps}" if spec.int8 else \
        f"d + i * {gemm.k}"
    for each in _tall(spec, s):
        made.append(f"for (; i + {each} <= {rows}; i += {each}) dots_{each}(w, p * {-(-gemm.n // TILE)} + t, "
                    f"lane, {of_a}, sums[p * {gemm.m} + i] + lane);")
    return "\n      ".join(made)


def _main_loop(spec: QuantGemmSpec, rows: int) -> str:
    """The main loop of so many rows of a."""
    k, step = spec.gemm.k, tiles.step_of(spec.type)
    chains = range(_chains(spec, rows))
    names = [f"total{r}{'' if spec.int8 else f'_{c}'}" for r in range(rows) for c in chains]
    sums = " ".join(f"vf {name} = (vf)0.f;" for name in names)
    inner = []
    for at in range(0, INT8_BLOCK, step):
        inner.append(f"{{ const s64 k = at + {at}, s = k / {step};")
        inner += [f"const vf {name} = {text};" for name, text in tiles.factors(spec).items()]
        inner += tiles.codes(spec, step, at)
        inner += (_bytes if spec.int8 else _floats)(spec, rows, step)
        inner.append("}")
    lines = "\n    ".join(inner)
    each = len(names) // rows
    stores = " ".join(f"store_f32(to + {r * TILE}, {' + '.join(names[r * each:(r + 1) * each])});"
                      for r in range(rows))
    of_a = "const float *restrict x"
    if spec.int8: of_a = "const s8 *restrict q, const float *restrict d, const float *sq, const s32 *start"
    return f"""
NOINLINE void dots_{rows}(matrix w, s64 t, s64 lane, {of_a}, float *restrict to) {{
  {sums}
  for (s64 b = 0; b < {k // INT8_BLOCK}; b++) {{
    const s64 at = b * {INT8_BLOCK};
    {lines}
  }}
  {stores}
}}"""


def _chains(spec: QuantGemmSpec, rows: int) -> int:
    """Totals of a row: of few rows one alone would wait for itself at each column."""
    return 1 if spec.int8 else max(1, CHAINS // rows)


def _bytes(spec: QuantGemmSpec, rows: int, step: int) -> list[str]:
    """C of a step of bytes: W outputs of all rows."""
    type, k = spec.type, spec.gemm.k
    steps, blocks = k // step, k // INT8_BLOCK
    begin = "(vi)start[s + {}]" if tiles.shift(type) else "(vi)0"
    out = [f"vi c{r} = {begin.format(r * steps)};" for r in range(rows)]
    out += [f"c{r} = dots_(c{r}, y{i}, q + k + {r * k + 4 * i});"
            for i in range(step // 4) for r in range(rows)]
    for r in range(rows):
        value = f"to_f(c{r})"
        if type.zeros: value = f"({value} - zero * sq[s + {r * steps}])"
        value = f"{value} * scale"
        if type.mins: value = f"({value} - low * sq[s + {r * steps}])"
        out.append(f"total{r} = fma_({value}, (vf)d[b + {r * blocks}], total{r});")
    return out


def _floats(spec: QuantGemmSpec, rows: int, step: int) -> list[str]:
    """C of a step of numbers: each of its columns dequantised, times all rows."""
    type, k = spec.type, spec.gemm.k
    shift = tiles.shift(type)
    zero = " + ".join([*["zero"] * type.zeros, *[f"{float(shift)}f"] * (shift > 0)])
    out = [f"const vf less = (vf){zero};"] if zero else []
    for column in range(step):
        value = f"to_f((vi)((vu)y{column // 4} >> {column % 4 * 8}) & 255)"
        if zero: value = f"({value} - less)"
        value = f"{value} * scale{' - low' if type.mins else ''}"
        out.append(f"{{ const vf v = {value};")
        for r in range(rows):
            total = f"total{r}_{column % _chains(spec, rows)}"
            out.append(f"{total} = fma_(v, (vf)x[k + {r * k + column}], {total});")
        out.append("}")
    return out
