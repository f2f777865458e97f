"""Dropped probabilities (tile/attention/dropout.py) in C, many calls of the generator at a time.

Protocol: `text()` is a function

    draw(bytes, pitch, rows, row, columns, column, matrix, seed)

that gives each element of `rows` rows from `row` on and `columns` columns from `column` on, both multiples
of 64, the byte that says whether it is kept: bytes[i · pitch + j], kept where it is below `kept`. Lanes of a
vector are calls: 16 elements of a row each.
"""
from __future__ import annotations

from tinygrad_nv.tile.attention.dropout import MULTIPLIERS, ROUNDS, WEYL


def text() -> str:
    """The function."""
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
