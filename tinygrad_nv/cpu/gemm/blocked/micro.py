"""The innermost loop of the blocked GEMM: a block of the result in registers.

Protocol: `micro` makes the C function

    micro(a, b, c, units, first, shift)

which adds to rows x columns of c (float32 or int32, rows `row` elements apart) the product of `rows` rows of
packed a, `pitch` units apart, and a panel of packed b, `units` deep; `first` overwrites c instead. Vectors
lie along n: at each step those of b are loaded once, each unit of a is spread over the lanes. Sums start at
0 and run over k one after the other, then they are added to c: the order does not depend on where in the
result an element is.

Bytes by quads: b times a with its highest bits turned is 128 b too much or too little for each k, so sums
start at `shift`, minus b times a quad of 0x80, which `shifts` computes once a panel.
"""
from __future__ import annotations

from tinygrad_nv.cpu.gemm.schedules import CPUGemm


def micro(schedule: CPUGemm, kind: str, pitch: int, whole: bool, free: bool, shifted: bool,
          line: int, suffix: str = "") -> str:
    """`suffix` ends the function's name. `whole`: c is int32. `free`: a's bytes are the ones without a sign.
    `shifted`: their highest bits are
    turned. `line`: bytes of 16 units, where they are fetched ahead of 16 rows of b, `apart` from each other;
    0: nothing is."""
    rows, columns, row = schedule.rows, schedule.columns, schedule.block_n
    vectors, own = columns // schedule.isa.lanes, "vi" if kind == "quad" else "vf"
    names = [(r, v) for r in range(rows) for v in range(vectors)]
    start = "*(const vi_u *)(shift + {} * W)" if shifted else f"({own})0"
    lines = [f"{own} s{r}_{v} = {start.format(v)};" for r, v in names]
    step = [f"__builtin_prefetch(ahead + k % 16 * apart + k / 16 * {line}, 0, 2);"] if line else []
    step += [f"const vi y{v} = *(const vi_u *)(b + k * {columns} + {v} * W);" for v in range(vectors)]
    for r in range(rows):
        step.append(f"const vi x{r} = (vi)(s32)a[{r} * {pitch} + k];")
        step += [f"s{r}_{v} = {_dot(kind, f's{r}_{v}', f'x{r}', f'y{v}', free)};" for v in range(vectors)]
    lines.append(f"for (u64 k = 0; k < units; k++) {{ {' '.join(step)} }}")
    c = "vi" if whole else "vf"
    value = "to_i({})" if whole and kind == "fma" else "{}"
    stores = [(f"*({c}_u *)(c + {r * row} + {v} * W)", value.format(f"s{r}_{v}")) for r, v in names]
    lines.append(f"if (first) {{ {' '.join(f'{at} = {x};' for at, x in stores)} }}")
    lines.append(f"else {{ {' '.join(f'{at} += {x};' for at, x in stores)} }}")
    text = "\n  ".join(lines)
    shift = ", const s32 *shift" if shifted else ""
    ahead = ", const u8 *ahead, u64 apart" if line else ""
    result = "s32" if whole else "float"
    made = f"""
NOINLINE void micro{suffix}(const word *restrict a, const u32 *restrict b, {result} *restrict c, u64 units,
                    int first{shift}{ahead}) {{
  {text}
}}"""
    return made + (_shifts(columns, free, suffix) if shifted else "")


def _dot(kind: str, c: str, a: str, b: str, free: bool) -> str:
    if kind == "quad" and not free: a, b = b, a
    return f"dot_{kind}({c}, {a}, {b})"


def _shifts(columns: int, free: bool, suffix: str) -> str:
    step = _dot("quad", "s", "(vi)(s32)0x80808080", f"*(const vi_u *)(b + k * {columns} + v)", free)
    return f"""
NOINLINE void shifts{suffix}(const u32 *restrict b, s32 *restrict to, s64 units) {{
  for (int v = 0; v < {columns}; v += W) {{
    vi s = (vi)0;
    for (s64 k = 0; k < units; k++) s = {step};
    *(vi_u *)(to + v) = -s;
  }}
}}"""
