"""The C of kernel.py: a block of keys against a block of rows, and the loops around it.

Protocol: scratch memory is a struct on a thread's stack. `pair` does what a block of rows and one of keys
have in common; constants say whether dk and dv, dq, or all of them are asked for. Rows and columns count from
the block's first; `at` is where row 0 stands among the columns: row i sees columns i + at + first … i + at +
last.

Tiles begin at multiples of ROWS, panels at multiples of `panel`. Scores are computed for a tile of rows in
the panels that hold whatever tiles of keys its rows see something of, so that everything that dv, dk and dq
are sums over has been computed, and is 0 where it is hidden. Rows and keys after the last are never summed
over, and results of theirs are not stored.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import e, log2

from tinygrad_nv.cpu.attention.backward.tiles import (
    NOINLINE,
    ROWS,
    TileProduct,
    add,
    functions,
    most_vectors,
    pitch,
    read,
    turn,
    write,
)
from tinygrad_nv.cpu.attention.score import C_INTEGERS, EXTENTS, C, dropout_text, loop_documents
from tinygrad_nv.cpu.expression import LanePlace, c_float, statements
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import c_type, up
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.band import BlockRange
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.documents import own_score
from tinygrad_nv.tile.attention.spec import KEEP_ALL, Rows

BATCH = ("b0", "b1", "b2")


@dataclass(frozen=True)
class Text:
    """C text of a backward kernel: blocks of `m` rows and `n` keys."""
    spec: BackwardSpec
    isa: ISA
    m: int
    n: int

    @property
    def panel(self) -> int:
        """Columns of a tile of scores."""
        return most_vectors(self.isa) * self.isa.lanes

    @cached_property
    def products(self) -> dict[str, TileProduct]:
        """By what they make: s, dp, dv, dk, dq."""
        q, v, n = pitch(self.spec.forward.d), pitch(self.spec.forward.d_v), pitch(self.n)
        return {"s": TileProduct(f"scores{q}_", q, 1, n, n, False),
                "dp": TileProduct(f"scores{v}_", v, 1, n, n, False),
                "dv": TileProduct(f"keys{v}_", 1, n, v, v, True),
                "dk": TileProduct(f"keys{q}_", 1, n, q, q, True),
                "dq": TileProduct("rows_", n, 1, q, q, False)}

    @cached_property
    def where(self) -> tuple[str, str]:
        """C of the head, of where row 0 stands, and of what expressions read: as parameters, as arguments."""
        one = self.spec.forward
        pointers = [("u32", "seed")] * (one.kept < KEEP_ALL)
        pointers += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(one.parameters)]
        numbers = [*BATCH, "start"]
        parameters = [f"s64 {name}" for name in numbers]
        parameters += [f"const {kind} *{name}" for kind, name in pointers]
        return ", ".join(parameters), ", ".join([*numbers, *(name for _, name in pointers)])

    # **** functions ****

    def functions(self) -> str:
        """Everything ahead of the kernel."""
        one, isa = self.spec.forward, self.isa
        widths = {"s": self.panel, "dp": self.panel, "dv": one.d_v, "dk": one.d, "dq": one.d}
        products = [(self.products[name], d) for name, d in widths.items()]
        made = [EXTENTS, functions(products, isa), add("add_dq", one.d, isa)]
        made += [read(f"read_{name}", rows.dtype, d, isa) for name, rows, d in (
            ("q", one.q, one.d), ("k", one.k, one.d), ("grad", self.spec.grad, one.d_v))]
        made += [turn(f"turn_{name}", rows.dtype, d, pitch(self.n), isa)
                 for name, rows, d in (("k", one.k, one.d), ("v", one.v, one.d_v))]
        made += [write(f"write_{name}", rows.dtype, d, isa)
                 for name, rows, d in (("dk", self.spec.dk, one.d), ("dv", self.spec.dv, one.d_v))]
        if one.kept < KEEP_ALL: made.append(dropout_text())
        return "\n".join([*made, self._scratch(), self._weights(), self._pair()])

    def _scratch(self) -> str:
        one, n = self.spec.forward, self.n + ROWS
        m, (q, v) = up(self.m, ROWS), (pitch(one.d), pitch(one.d_v))
        sizes = {"q": m * q, "grad": m * v, "k": n * q, "kt": up(one.d, self.isa.lanes) * pitch(self.n),
                 "vt": up(one.d_v, self.isa.lanes) * pitch(self.n), "s": m * pitch(self.n),
                 "dp": m * pitch(self.n), "dk": n * q, "dv": n * v, "dq": ROWS * q, "l": m, "delta": m}
        lines = [f"float {name}[{size}] __attribute__((aligned(64)));" for name, size in sizes.items()]
        if one.kept < KEEP_ALL: lines.append(f"u8 bytes[{self.m * self.n}];")
        return f"typedef struct {{ {' '.join(lines)} }} scratch;"

    def _weights(self) -> str:
        """s and dp of a tile become p and ds, in a panel."""
        one, n, (where, given) = self.spec.forward, pitch(self.n), self.where
        place = LanePlace(["s"], "m", "n", BATCH, "count", "start")
        scored = own_score(one.score) if one.documents else one.score
        scores, score = statements(scored, place)
        slopes, slope = statements(derivative(scored, precise=True), place, "u")
        dropped, values, scale = "", "p", c_float(KEEP_ALL / one.kept)
        if one.kept < KEEP_ALL:
            dropped = f"""const vi keep = load_u8(bytes + i * {self.n} + c) < {one.kept};
      dp = pick(keep, dp * {scale}, (vf)0.f);"""
            values = f"pick(keep, p * {scale}, (vf)0.f)"
        return f"""
// columns low + i … high + i - 1 of row i are seen, where not `all` are; what is at `limit` and after is
// summed nowhere, and read from no parameter
INLINE void some(float *to_s, float *to_dp, const float *l, const float *delta, const u8 *bytes, s64 rows,
    s64 row, s64 column, s64 low, s64 high, s64 limit, const int all, {where}) {{
  for (s64 i = 0; i < rows; i++) {{
    const s64 m = row + i;
    for (s64 c = 0; c < {self.panel}; c += W) {{
      const s64 n = column + c, count = all ? W : limit - c;
      const vf s = load_f32(to_s + i * {n} + c);
      vf dp = load_f32(to_dp + i * {n} + c);
      {" ".join(scores)}
      {" ".join(slopes)}
      // at most 1, however large the scores that are rounded
      vf p = exp2_small(min_((vf)0.f, ({score} - l[i]) * {c_float(log2(e))}));
      if (!all) {{
        const vi at = iota_() + (s32)c;
        p = pick((at >= (s32)(low + i)) & (at < (s32)(high + i)), p, (vf)0.f);
      }}
      {dropped}
      // whatever v and the slope are where nothing is seen
      const vf ds = pick(p == 0.f, (vf)0.f, p * (dp - delta[i]) * {slope});
      store_f32(to_s + i * {n} + c, {values});
      store_f32(to_dp + i * {n} + c, ds);
    }}
  }}
}}
{NOINLINE} weights(float *s, float *dp, const float *l, const float *delta,
    const u8 *bytes, s64 rows, s64 row, s64 column, s64 low, s64 high, s64 limit, {where}) {{
  // the last row sees the first column, the first row the last
  if (low + rows - 1 <= 0 && high >= {self.panel} && limit >= {self.panel})
    some(s, dp, l, delta, bytes, rows, row, column, low, high, limit, 1, {given});
  else some(s, dp, l, delta, bytes, rows, row, column, low, high, limit, 0, {given});
}}"""

    def _pair(self) -> str:
        one, band, n = self.spec.forward, self.spec.forward.band, pitch(self.n)
        q, v, (where, given) = pitch(one.d), pitch(one.d_v), self.where
        columns = BlockRange(C_INTEGERS, band, C("t + at"), C("t + mine + at"), C("cols")).visible()
        row = BlockRange(C_INTEGERS, band, C("t + at - c"), C("t + at - c"), None, size=1).full()
        rows = BlockRange(C_INTEGERS, band.transpose(), C("t - at"), C(f"smaller(t + {ROWS}, cols) - at"),
                          C("rows")).visible()
        low, high = ("-(1ll << 30)" if row.begin is None else row.begin,
                     "1ll << 30" if row.end is None else row.end)
        draws, bytes_ = "", "0"
        if one.kept < KEEP_ALL:
            matrix = f"(u32)((b0 * {one.batch[1]} + b1) * {one.batch[2]} + b2)"
            draws = f"draw(z->bytes, {self.n}, rows, i0, {self.n}, j0, {matrix}, seed);"
            bytes_ = f"z->bytes + t * {self.n} + c"

        def product(name: str, a: str, b: str, out: str, count: str, width: int) -> str:
            return self.products[name].over(a, b, out, count, width, self.isa)
        return f"""
INLINE void pair(scratch *z, float *dq, s64 i0, s64 j0, s64 rows, s64 cols, const int of_keys,
    const int of_rows, {where}) {{
  const s64 at = i0 + start - j0;
  {draws}
  for (s64 t = 0; t < rows; t += {ROWS}) {{
    const s64 mine = smaller(rows - t, {ROWS}), lo = {columns.begin}, hi = {columns.end};
    if (lo >= hi) continue;
    const s64 end = smaller({self.n}, (hi + {ROWS - 1}) / {ROWS} * {ROWS});
    for (s64 c = lo / {ROWS} * {ROWS} / {self.panel} * {self.panel}; c < end; c += {self.panel}) {{
      float *s = z->s + t * {n} + c, *dp = z->dp + t * {n} + c;
      {product("s", f"z->q + t * {q}", "z->kt + c", "s", str(one.d), self.panel)}
      {product("dp", f"z->grad + t * {v}", "z->vt + c", "dp", str(one.d_v), self.panel)}
      weights(s, dp, z->l + t, z->delta + t, {bytes_}, mine, i0 + t, j0 + c, {low}, {high}, cols - c,
              {given});
    }}
    if (!of_rows) continue;
    {product("dq", f"z->dp + t * {n} + lo", f"z->k + lo * {q}", "z->dq", "hi - lo", one.d)}
    add_dq(dq + t * {one.d}, z->dq, {one.d}, mine);
  }}
  if (of_keys) for (s64 t = 0; t < cols; t += {ROWS}) {{
    const s64 since = {rows.begin}, until = {rows.end}, count = until - since;
    if (since >= until) continue;
    {product("dv", f"z->s + since * {n} + t", f"z->grad + since * {v}", f"z->dv + t * {v}", "count", one.d_v)}
    {product("dk", f"z->dp + since * {n} + t", f"z->q + since * {q}", f"z->dk + t * {q}", "count", one.d)}
  }}
}}"""

    # **** the kernel's body ****

    def body(self, parts: int, keys: int, rows: int) -> str:
        """All of it, for so many blocks of keys and of rows."""
        heads = self.spec.forward.batch[0] * self.spec.forward.batch[1]
        if self.spec.forward.documents:
            made = self.heads_of_documents(parts) if parts <= heads else self.blocks_of_documents(parts)
        else: made = self.heads(parts) if parts <= heads else self.blocks(parts, keys, rows)
        return self.extents() + made

    def extents(self) -> str:
        """Extents that are no arguments, and scratch memory."""
        one = self.spec.forward
        fixed = "".join(f"  const s64 {name} = {getattr(one, name)};\n" for name in ("s_q", "s_kv", "start")
                        if name not in one.symbolic)
        return f"{fixed}  const s64 lead = 0;\n  scratch own, *z = &own;\n"

    def heads(self, parts: int) -> str:
        """A part has whole key heads."""
        one = self.spec.forward
        b, heads, group = one.batch
        return f"""  for (s64 item = core_id; item < {b * heads}; item += {parts}) {{
    const s64 b0 = item / {heads}, b1 = item % {heads};
    for (s64 b2 = 0; b2 < {group}; b2++) {self._clear_rows("s_q", "0")}
    for (s64 j0 = 0; j0 < s_kv; j0 += {self.n}) {{ {self._keys(1)} }}
  }}"""

    def blocks(self, parts: int, keys: int, rows: int) -> str:
        """A part has blocks of keys, and blocks of rows. What most has to be done for comes first where the
        band is causal."""
        one = self.spec.forward
        b, heads, group = one.batch
        return f"""  for (s64 item = core_id; item < {keys + rows}; item += {parts}) if (item < {keys}) {{
    const s64 head = item % {b * heads}, b0 = head / {heads}, b1 = head % {heads};
    const s64 j0 = item / {b * heads} * {self.n};
    if (j0 < s_kv) {{ {self._keys(0)} }}
  }} else {{
    const s64 number = {keys + rows - 1} - item, head = number % {one.matrices}, b0 = head / {heads * group};
    const s64 b1 = head / {group} % {heads}, b2 = head % {group}, i0 = number / {one.matrices} * {self.m};
    if (i0 < s_q) {{
      {self._visit_keys()}
    }}
  }}"""

    def heads_of_documents(self, parts: int) -> str:
        """`heads` of documents: as if each were an attention of its own, from row `lead` to s_q."""
        b, heads, group = self.spec.forward.batch
        inside = f"for (s64 j0 = lead; j0 < s_kv; j0 += {self.n}) {{ {self._keys(1)} }}"
        outside = f"for (s64 j0 = lead; j0 < s_kv; j0 += {self.n}) {{ {self._unseen()} }}"
        return f"""  for (s64 item = core_id; item < {b * heads}; item += {parts}) {{
    const s64 b0 = item / {heads}, b1 = item % {heads};
    for (s64 b2 = 0; b2 < {group}; b2++) {self._clear_rows("s_q", "0")}
    {loop_documents(self.spec.forward, inside, outside)}
  }}"""

    def blocks_of_documents(self, parts: int) -> str:
        """`blocks` of documents. Every part counts all blocks, and takes its own."""
        b, heads, group = self.spec.forward.batch

        def take_blocks(made: str, of_rows: bool) -> str:
            at, block = ("i0", self.m) if of_rows else ("j0", self.n)
            queries = f" for (s64 b2 = 0; b2 < {group}; b2++)" if of_rows else ""
            return f"""for (s64 {at} = lead; {at} < s_q; {at} += {block}){queries}
      if (number++ % {parts} == core_id) {{ {made} }}"""
        cleared = f"const s64 rows = smaller(s_q - i0, {self.m}); {self._clear_rows('rows', 'i0')}"
        inside = take_blocks(self._keys(0), False) + take_blocks(self._visit_keys(), True)
        outside = take_blocks(self._unseen(), False) + take_blocks(cleared, True)
        return f"""  s64 number = 0;
  for (s64 b0 = 0; b0 < {b}; b0++) for (s64 b1 = 0; b1 < {heads}; b1++)
  {loop_documents(self.spec.forward, inside, outside)}"""

    def _unseen(self) -> str:
        """dk and dv of tokens of no document."""
        return f"""const s64 cols = smaller(s_kv - j0, {self.n});
      {self._no_results()}
      {self._results()}"""

    def _keys(self, of_rows: int) -> str:
        """A block of keys meets all rows that see it."""
        one = self.spec.forward
        rows = BlockRange(C_INTEGERS, one.band.transpose(), C("j0 - start"), C("j0 + cols - start"), C("s_q"),
                          least=C("lead")).visible()
        return f"""
      const s64 cols = smaller(s_kv - j0, {self.n}), end_row = {rows.end};
      const s64 first_row = lead + ({rows.begin} - lead) / {self.m} * {self.m};
      {self._no_results()}
      {self._columns_read()}
      for (s64 b2 = 0; b2 < {one.batch[2]}; b2++) for (s64 i0 = first_row; i0 < end_row; i0 += {self.m}) {{
        const s64 rows = smaller(s_q - i0, {self.m});
        {self._rows()}
        {self._call_pair(1, of_rows)}
      }}
      {self._results()}"""

    def _no_results(self) -> str:
        """dk and dv of a block of keys, and of the rest of its last tile, become 0."""
        q, v = pitch(self.spec.forward.d), pitch(self.spec.forward.d_v)
        return f"""for (s64 c = 0; c < (cols + {ROWS}) * {q}; c += W) store_f32(z->dk + c, (vf)0.f);
      for (s64 c = 0; c < (cols + {ROWS}) * {v}; c += W) store_f32(z->dv + c, (vf)0.f);"""

    def _results(self) -> str:
        return f"""write_dk(dk + {_at(self.spec.dk, "j0")}, z->dk, {self.spec.dk.row}, cols);
      write_dv(dv + {_at(self.spec.dv, "j0")}, z->dv, {self.spec.dv.row}, cols);"""

    def _columns(self) -> str:
        """Returns C of the columns that a block of rows sees."""
        seen = BlockRange(C_INTEGERS, self.spec.forward.band, C("i0 + start"), C("i0 + rows + start"),
                          C("s_kv"), least=C("lead")).visible()
        return f"const s64 first_column = {seen.begin}, end_column = {seen.end};"

    def _visit_keys(self) -> str:
        """Returns C by which a block of rows meets all keys that it sees, for dq."""
        return f"""const s64 rows = smaller(s_q - i0, {self.m});
      {self._rows()}
      {self._clear_rows("rows", "i0")}
      {self._columns()}
      for (s64 j0 = lead + (first_column - lead) / {self.n} * {self.n}; j0 < end_column; j0 += {self.n}) {{
        const s64 cols = smaller(s_kv - j0, {self.n});
        {self._columns_read()}
        {self._call_pair(0, 1)}
      }}"""

    def _columns_read(self) -> str:
        one = self.spec.forward
        k, v = f"k + {_at(one.k, 'j0')}, {one.k.row}, cols", f"v + {_at(one.v, 'j0')}, {one.v.row}, cols"
        return f"read_k(z->k, {k}); turn_k(z->kt, {k}); turn_v(z->vt, {v});"

    def _rows(self) -> str:
        """Reads a block of rows. Those that see nothing have an l that makes all their p 0."""
        one = self.spec.forward
        return f"""read_q(z->q, q + {_at(one.q, "i0")}, {one.q.row}, rows);
        read_grad(z->grad, grad + {_at(self.spec.grad, "i0")}, {self.spec.grad.row}, rows);
        for (s64 i = 0; i < rows; i++) {{
          const s64 from = {self._row("i0 + i")};
          z->l[i] = l[from] == -__builtin_inff() ? __builtin_inff() : l[from];
          z->delta[i] = delta[from];
        }}"""

    def _call_pair(self, of_keys: int, of_rows: int) -> str:
        where = f"dq + ({self._row('i0')}) * {self.spec.forward.d}"
        return f"pair(z, {where}, i0, j0, rows, cols, {of_keys}, {of_rows}, {self.where[1]});"

    def _clear_rows(self, rows: str, first: str) -> str:
        d = self.spec.forward.d
        return f"""{{
        float *to = dq + ({self._row(first)}) * {d};
        for (s64 i = 0; i < {rows} * {d}; i += W) store_n_f32(to + i, (vf)0.f, {rows} * {d} - i);
      }}"""

    def _row(self, row: str) -> str:
        """Returns the index among all rows of a row of one head: of dq, l and delta."""
        _, heads, group = self.spec.forward.batch
        return f"((b0 * {heads} + b1) * {group} + b2) * {self.spec.forward.s_q} + {row}"


def _at(rows: Rows, row: str) -> str:
    """Returns C of where a row lies."""
    terms = zip((*BATCH, f"({row})"), (*rows.batch, rows.row), strict=True)
    return " + ".join([str(rows.offset), *(f"{name} * (s64){stride}" for name, stride in terms if stride)])
