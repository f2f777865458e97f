"""Scores, masks, softmax, dropout and documents of attention, in C.

Protocol: `softmax` is what happens to ROWS rows of a head in a block of columns, from q kᵀ to o = alpha o +
p v, where flash.py has `head`, `r`, `c0`, `cols`, `count`. Rows after the last are computed like the last one
and stored nowhere. A score that is the sum's multiple is not computed: the exponent is fma(sum, c, −top c).
Others are expressions over vectors of columns (cpu/expression.py); columns after the last are not loaded.

Weights are rounded to v's dtype after they are summed; of 8 bits 2⁸ times as large (`lift`,
tile/attention/spec.py). Blocks begin at multiples of 64 columns, as dropout draws them.

`dropout_text` is the C of dropped probabilities (tile/attention/dropout.py), many calls of the generator at a
time: a function `draw(bytes, pitch, rows, row, columns, column, matrix, seed)` that gives each element of
`rows` rows from `row` on and `columns` columns from `column` on, both multiples of 64, the byte that says
whether it is kept: bytes[i · pitch + j], kept where it is below `kept`. Lanes of a vector are calls: 16
elements of a row each.

`loop_documents` is a loop over the documents (tile/attention/documents.py) of key head b1 of element b0 of
the batch, in order, each as if it were an attention alone. Inside, `lead` is the first token of one, `s_q`
and `s_kv` the token after its last: they hide the kernel's own. Runs of tokens that are no document's are
given to what is written `outside`. So blocks of rows and of keys begin with a document and are of one alone:
numbers are computed as if the document were the whole row, to the bit, what lies between documents takes no
time, and nothing of one is ever multiplied by another's. Bounds that are wrong give wrong numbers, but
nothing beside the operands is read or written.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.attention.blocks import ROWS, AttentionBlocks
from tinygrad_nv.cpu.expression import LanePlace, c_float, statements
from tinygrad_nv.tile.attention.band import Arithmetic, BlockRange
from tinygrad_nv.tile.attention.documents import bounds, own_score
from tinygrad_nv.tile.attention.dropout import MULTIPLIERS, ROUNDS, WEYL
from tinygrad_nv.tile.attention.spec import KEEP_ALL, SCALED, AttentionSpec, multiple
from tinygrad_nv.tile.expression import Expression, Load, loads, short

LOG2E = 1.4426950408889634
LIFT = 256.0  # of weights of 8 bits
EXTENTS = """
INLINE s64 smaller(s64 a, s64 b) { return a < b ? a : b; }
INLINE s64 larger(s64 a, s64 b) { return a > b ? a : b; }"""


@dataclass(frozen=True)
class C:
    """An integer (s64) in C, for the arithmetic of band.py."""
    text: str

    def __add__(self, other: C | int) -> C: return C(f"{self} + {other}")
    def __sub__(self, other: C | int) -> C: return C(f"{self} - {other}")
    def __str__(self) -> str: return f"({self.text})" if " " in self.text else self.text


C_INTEGERS = Arithmetic(lambda a, b: C(f"smaller({a}, {b})"), lambda a, b: C(f"larger({a}, {b})"),
                        lambda number, by: C(f"{number} / {by}"))


def problems(spec: AttentionSpec) -> list[str]:
    """Returns what is in the way of a score."""
    return expression.problems(spec.score)


def lift(spec: AttentionSpec) -> str:
    """By what the result is to be multiplied beside 1 / sum, as a literal."""
    return c_float((KEEP_ALL / spec.kept) / (LIFT if spec.v.dtype == SCALED else 1.0))


def before(spec: AttentionSpec) -> str:
    """Functions that `softmax` calls."""
    return EXTENTS + (dropout_text() if spec.kept < KEEP_ALL else "")


def softmax(spec: AttentionSpec, blocks: AttentionBlocks, rows: int) -> str:
    """C for ROWS rows from `r` on, of `rows` that a head has in a tile."""
    n, cols = blocks.block_n, C("c0 + cols")
    columns = BlockRange(C_INTEGERS, spec.band, C("at"), C("at + mine"), cols, least=C("c0"))
    seen, full = columns.visible(), columns.full()
    every = [f"c0 + end * W <= {full.end}"]
    if full.begin is not None: every.append(f"c0 + begin * W >= {full.begin}")
    p = "(const s32 *)weights" if blocks.pairs else "s"
    return f"""const s64 mine = count - r < {ROWS} ? count - r : {ROWS}, at = first_row + r + starts;
        const s64 low = {seen.begin}, high = {seen.end};
        if (low >= high) continue;
        const s64 begin = (low - c0) / W, end = (high - c0 + W - 1) / W, from = low - c0, to = high - c0;
        const int all = {" && ".join(every)};
        const s64 index = head * {rows} + r;
        const {"s32" if blocks.pairs else "float"} *qs = qs_ + index * {blocks.units};
        float *os = o_ + index * {blocks.width}, alpha[{ROWS}];
        {blocks.products()}
        {_draw_bytes(spec, n)}
        for (s64 i = 0; i < {ROWS}; i++) {{
          const s64 row = i < mine ? i : mine - 1, place = at + row, m = first_row + r + row;
          float *line = s + i * {n};
          {_score_row(spec)}
          {_weights(spec, blocks)}
        }}
        const {"s32" if blocks.pairs else "float"} *p = {p};
        {blocks.weighteds()}"""


def _draw_bytes(spec: AttentionSpec, block_n: int) -> str:
    """The bytes that say what is dropped."""
    if spec.kept == KEEP_ALL: return ""
    _, kv, group = spec.batch
    return f"""u8 bytes[{ROWS * block_n}];
        draw(bytes, {block_n}, {ROWS}, first_row + r, {block_n}, c0,
             (b0 * {kv} + b1) * {group} + first_head + head, seed);"""


def _score_row(spec: AttentionSpec) -> str:
    """Scores of a row in base 2, or multiples of them, and the largest."""
    seen = BlockRange(C_INTEGERS, spec.band, C("place"), C("place"), C("c0 + cols"), size=1).full()
    return f"""vf most = (vf)-__builtin_inff();
          if (all) for (s64 v = begin; v < end; v++) {{
            vf x = load_f32(line + v * W);
            {_score(spec, "")}
            most = max_(x, most);
          }} else {{
            const s64 left = {"c0" if seen.begin is None else seen.begin}, right = {seen.end};
            for (s64 v = begin; v < end; v++) {{
              vf x = load_f32(line + v * W);
              {_score(spec, "rows_k - c0 - v * W")}
              const vi c = iota_() + (s32)(c0 + v * W);
              x = pick((c >= (s32)left) & (c < (s32)right), x, (vf)-__builtin_inff());
              store_f32(line + v * W, x);
              most = max_(x, most);
            }}
          }}"""


def score_of(spec: AttentionSpec) -> Expression:
    """The score of columns that a row sees."""
    return own_score(spec.score) if spec.documents else spec.score


def _score(spec: AttentionSpec, count: str) -> str:
    """x becomes its score, where that is more than a multiple. The least float32 in base 2 would be -inf,
    which is what is not seen."""
    score = score_of(spec)
    if multiple(score) is not None: return ""
    place = LanePlace(["x"], "m", "(c0 + v * W)", ["b0", "b1", "(first_head + head)"],
                  count if any(load.n for load in loads(score)) else "", "starts")
    made, value = statements(score, place)
    return f"{{ {' '.join(made)} x = {value}; }} store_f32(line + v * W, x);"


def _weights(spec: AttentionSpec, blocks: AttentionBlocks) -> str:
    """Weights of a row, the sum of its weights, and by what the result so far is multiplied."""
    scale, n = multiple(score_of(spec)), blocks.block_n
    factor = base(spec)
    exponent = f"fma_(x, (vf){factor}, -(vf)(shift * {factor}))"
    if scale is None: exponent = f"(x - shift) * {factor}"
    before = f"(tops_[index + i] - shift) * {factor}"
    kind = short(spec.v.dtype)
    if blocks.pairs: store = f"*(vh_u *)(weights + i * {n} + v * W) = weights_(p);"
    elif spec.v.dtype == SCALED: store = f"store_f32(line + v * W, round_e4m3(p * {c_float(LIFT)}));"
    elif spec.v.dtype == dtypes.float32: store = "store_f32(line + v * W, p);"
    else: store = f"store_f32(line + v * W, round_{kind}(p));"
    drop = ""
    if spec.kept < KEEP_ALL: drop = f"p = pick(load_u8(bytes + i * {n} + v * W) < {spec.kept}, p, (vf)0.f);"
    return f"""const float peak = peak_(most), old = tops_[index + i];
          const float top = peak > old ? peak : old, shift = top == -__builtin_inff() ? 0.f : top;
          alpha[i] = exp2_small((vf)({before}))[0];
          tops_[index + i] = top;
          vf sum = sums_[index + i] * alpha[i];
          for (s64 v = begin; v < end; v++) {{
            const vf x = load_f32(line + v * W);
            vf p = exp2_small({exponent});
            sum += p;
            {drop} {store}
          }}
          sums_[index + i] = sum;"""


def _f32(value: float) -> str:
    """A literal of the nearest float32."""
    return f"{value!r}f"


def base(spec: AttentionSpec) -> str:
    """By what `tops_` are to be multiplied to be scores in base 2, as a literal."""
    scale = multiple(score_of(spec))
    return _f32(LOG2E if scale is None else scale * LOG2E)


def dropout_text() -> str:
    """The function `draw`."""
    (m0, m1), (w0, w1) = MULTIPLIERS, WEYL
    return f"""
typedef VECTOR(u64, W) vw;
INLINE vu upper_(vu x, u32 by) {{
  return __builtin_convertvector((__builtin_convertvector(x, vw) * (vw)(u64)by) >> 32, vu);
}}
static __attribute__((noinline)) void draw(u8 *bytes, s64 pitch, s64 rows, s64 row, s64 columns, s64 column,
    u32 matrix, const u32 *seed) {{
  const s64 calls = columns / 16;
  for (s64 first = 0; first < rows * calls; first += W) {{
    const vu call = (vu)(iota_() + (s32)first), line = call / (u32)calls, at = call - line * (u32)calls;
    vu a = line + (u32)row, b = at + (u32)(column / 16), c = (vu)matrix, d = (vu)0u;
    u32 k0 = seed[0], k1 = seed[1];
    for (int round = 0; round < {ROUNDS}; round++, k0 += {w0:#x}u, k1 += {w1:#x}u) {{
      const vu left = upper_(a, {m0:#x}u), low = a * {m0:#x}u;
      const vu right = upper_(c, {m1:#x}u), under = c * {m1:#x}u;
      a = right ^ b ^ k0; b = under; c = left ^ d ^ k1; d = low;
    }}
    for (s64 i = 0; i < W && first + i < rows * calls; i++) {{
      u8 *to = bytes + line[i] * pitch + at[i] / 4 * 64 + at[i] % 4 * 2;
      const u32 words[4] = {{a[i], b[i], c[i], d[i]}};
      for (int j = 0; j < 8; j++) *(u16_u *)(to + 8 * j) = (u16)(words[j / 2] >> 16 * (j % 2));
    }}
  }}
}}
""".replace("typedef VECTOR", "ANYWHERE(u16_u, u16); typedef VECTOR", 1)


def loop_documents(spec: AttentionSpec, inside: str, outside: str) -> str:
    """The loop. Needs `EXTENTS`."""
    first, end = (f"(x{load.parameter} + {_start(load)})" for load in bounds(spec))
    return f"""{{
    const s32 *begins = {first}, *ends = {end};
    for (s64 from = 0, until = 0; from < {spec.s_q}; from = until) {{
      const int seen = begins[from] < ends[from] && ends[from] > from;
      if (seen) until = smaller(ends[from], {spec.s_q});
      else for (until = from + 1; until < {spec.s_q} && begins[until] >= ends[until];) until++;
      const s64 lead = from, s_q = until, s_kv = until;
      if (seen) {{ {inside} }} else {{ {outside} }}
    }}
  }}"""


def _start(load: Load) -> str:
    b, heads, _ = load.batch or (0, 0, 0)
    return f"{load.offset} + b0 * (s64){b} + b1 * (s64){heads}"
