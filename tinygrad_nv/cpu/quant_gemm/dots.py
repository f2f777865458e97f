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

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.gemm.gemv.kernel import epilogue
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.quant_gemm import decode, tiles
from tinygrad_nv.cpu.quant_gemm.schedules import QuantDots
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec

FEW, PARTS = 16, 2          # of so many rows a is little work, and there are PARTS for each thread
CHAINS = 8                  # sums side by side, more than the latency of a multiplication asks for
BYTES_OF_PART = 64 << 10    # of codes; waking a thread takes as long as reading so much


def problems(spec: QuantGemmSpec, s: QuantDots) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    type, gemm = spec.type, spec.gemm
    if type.layout != "tiles": return ["a matrix that is not in tiles"]
    out = decode.problems(type) + expression.problems(gemm.epilogue)
    if type.element.values or dtypes.is_float(type.element.dtype): out.append(f"codes {type.element}")
    for scale in filter(None, (type.scale, type.outer)):
        if scale.e8m0 or (scale.columns != 16 and scale.columns % INT8_BLOCK):
            out.append(f"{'E8M0 ' if scale.e8m0 else ''}scales of {scale.columns} columns")
    if type.divided: out.append("divided scales")
    if gemm.k % INT8_BLOCK: out.append(f"K of {gemm.k}, a multiple of {INT8_BLOCK} is needed")
    if gemm.parts > 1 and gemm.n % TILE: out.append(f"parts of {gemm.n} columns, no multiple of {TILE}")
    return out if s.rows else [*out, "rows 0"]


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
    rows = "m" if gemm.symbolic else str(gemm.m)
    body = f"""
  {decode.packed_of(spec.type, n, k)}
  u8 *own = (u8 *)work + core_id * {own}ll;
  float (*sums)[{TILE}] = (float (*)[{TILE}])own;
  float *d = (float *)(sums + {gemm.parts * gemm.m});
  {_prologue(spec, rows)}
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
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.type, n, k),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("u8", "work")], ["m"] if gemm.symbolic else []
    before = [header("gemm.h"), decode.struct(spec.type, n, k),
              f"#define CODE_BITS {spec.type.bits}", DOTS, _rows_of_a(spec),
              *(_main_loop(spec, each) for each in _tall(spec, s))]
    return kernel(f"quant_dots_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  s.parts * own, "\n".join(before))


# **** rows of a ****

def _prologue(spec: QuantGemmSpec, rows: str) -> str:
    """C that brings a into the workspace, behind the totals."""
    m, k, a = spec.gemm.m, spec.gemm.k, spec.gemm.a
    steps, blocks = k // tiles.step_of(spec.type), k // INT8_BLOCK
    row = f"a + {a.offset} + i * {a.mn}ll, {'order' if spec.type.permuted else '0'}"
    if not spec.int8: return f"for (s64 i = 0; i < {rows}; i++) widen_({row}, d + i * {k});"
    return f"""float *sq = d + {m * blocks};
  s32 *start = (s32 *)(sq + {m * steps});
  s8 *q = (s8 *)(start + {m * steps});
  for (s64 i = 0; i < {rows}; i++)
    quantise_({row}, q + i * {k}, d + i * {blocks}, sq + i * {steps}, start + i * {steps});"""


def _rows_of_a(spec: QuantGemmSpec) -> str:
    """The functions that read W columns of a row of a, and that quantise or widen it. Products are not
    contracted: they are rounded before they are compared with halves."""
    a, k, step = spec.gemm.a, spec.gemm.k, tiles.step_of(spec.type)
    kind, element = short(a.dtype), c_type(a.dtype)
    read = f"strided_{kind}(p + k * {a.k}ll, {a.k}, W)" if a.k != 1 else f"load_{kind}(p + k)"
    if spec.type.permuted:
        read = f"({{ vf x; for (int i = 0; i < W; i++) x[i] = one_{kind}(p + order[k + i] * {a.k}ll); x; }})"
    took = f"const {element} *restrict p, const s32 *order"
    text = f"""
INLINE vf columns_({took}, s64 k) {{ return {read}; }}"""
    if not spec.int8: return f"""{text}
NOINLINE void widen_({took}, float *to) {{
  for (s64 k = 0; k < {k}; k += W) store_f32(to + k, columns_(p, order, k));
}}"""
    return f"""{text}
NOINLINE void quantise_({took}, s8 *q, float *d, float *sq, s32 *start) {{
#pragma clang fp contract(off)
  for (s64 k = 0; k < {k}; k += {INT8_BLOCK}) {{
    vf x[{INT8_BLOCK} / W], most = (vf)0.f;
    for (int v = 0; v < {INT8_BLOCK} / W; v++) {{
      x[v] = columns_(p, order, k + v * W);
      most = max_(abs_(x[v]), most);
    }}
    const float scale = largest_(most) / 127.f, times = scale != 0.f ? 1.f / scale : 0.f;
    d[k / {INT8_BLOCK}] = scale;
    vi sum = (vi)0;
    for (int v = 0; v < {INT8_BLOCK} / W; v++) {{
      const vi whole = as_i(x[v] * times + NEAREST) - as_i((vf)NEAREST);
      store_s8(q + k + v * W, whole);
      sum += whole;
      if ((v + 1) * W % {step} == 0) {{
        const s32 total = sum_i(sum);
        const s64 at = (k + v * W) / {step};
        sq[at] = (float)total;
        start[at] = total * -{tiles.shift(spec.type)};
        sum = (vi)0;
      }}
    }}
  }}
}}"""


# a quad of codes times a quad of a, which all lanes have; the largest lane
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
#elif HAVE_FMA
  const vi x = (vi)*(const quad_u *)q;
  return CODE_BITS < 8 ? c + pairs_(codes, x) :
    c + pairs_(codes & 0x7f7f7f7f, x) + pairs_(codes & (s32)0x80808080, x);
#else
  return dot_quad(c, codes, (vi)*(const quad_u *)q);
#endif
}
INLINE float largest_(vf x) {
#if W == 16
  VECTOR(float, 8) h = __builtin_elementwise_max(x.lo, x.hi);
  VECTOR(float, 4) f = __builtin_elementwise_max(h.lo, h.hi);
#elif W == 8
  VECTOR(float, 4) f = __builtin_elementwise_max(x.lo, x.hi);
#else
  VECTOR(float, 4) f = x;
#endif
  VECTOR(float, 2) g = __builtin_elementwise_max(f.lo, f.hi);
  return g.x > g.y ? g.x : g.y;
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
