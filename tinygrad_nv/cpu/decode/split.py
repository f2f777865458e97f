"""A split of keys in a decode attention: scores, softmax, weighted values.

Protocol: C for request `b`, key head `h`, the block of rows from `r0` on and the keys of split number `split`
among those from `first` to `n`, in these arrays on the stack, row r0 + r = i · group + g for row i of query
head g:

    wide[r]             q, in float32 or as pairs of bfloat16
    s[r]                scores, then weights
    top, total, sums    largest score (base 2), sum of the weights, weights times values
    k_at, v_at          where keys and values begin; k_by, v_by are their scales
    b2, h2, c2, n2      request, key head and first key of the split that this thread has next, and how many
                        keys that request has

Products of `W` pairs of a row and a key are summed over d at once, lane by lane, and the lanes then added up
in one tree (`sums_of`), halves to halves: a pair's sum has the same bits wherever it stands. Nothing is read
of keys and values that no row sees. Those of the next split are fetched meanwhile, as processors do not
foresee the few lines that a head has of each token: with that 64 requests of 160 keys (12 heads of 4) took
0.67 of the time on two threads of a Zen 5, with dot products of bfloat16, too, 0.59.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.attention.spec import Rows, multiple
from tinygrad_nv.tile.decode.spec import DecodeSpec, Pages, Scales
from tinygrad_nv.tile.expression import short


@dataclass(frozen=True)
class CPUDecode(CPUSchedule):
    """`split_keys` keys of a request at a time, for `block_rows` rows of a key head, a divisor of their
    number (0: all). `divided`: units of work are splits, combined by a second kernel; else blocks of
    rows."""
    split_keys: int = 256
    block_rows: int = 0
    divided: bool = False
    template: ClassVar[str] = "decode"
    widens: ClassVar[bool] = True

    def words(self) -> list[str]:
        rows = [f"{self.block_rows} rows"] if self.block_rows else []
        return [*super().words(), *rows, f"splits of {self.split_keys} keys", *["combined"] * self.divided]


LARGEST = "0x1.fffffep127f"

LINE_BYTES = 64
BLOCK, MANY_ROWS = 4, 16     # of many rows so many are multiplied with values at a time
NEAR_KEYS = 16  # whose values stay in the nearest cache while columns are taken block by block


class SplitText:
    """The C of a spec's splits."""

    def __init__(self, spec: DecodeSpec, schedule: CPUDecode) -> None:
        self.spec, self.isa, self.keys = spec, schedule.isa, schedule.split_keys
        self.lanes, self.rows = schedule.isa.lanes, schedule.block_rows or spec.rows
        self.d, self.d_v = (-(-extent // self.lanes) * self.lanes for extent in (spec.d, spec.d_v))
        self.pairs = self.isa.bf16 and not self.isa.emulated and spec.d % (2 * self.lanes) == 0 and \
            spec.q.dtype == spec.k.dtype == dtypes.bfloat16

    def declare_arrays(self) -> str:
        """Returns C that declares the arrays."""
        rows = self.rows
        scales = f"float k_by[{self.keys}], v_by[{self.keys}];" if self.spec.is_quantised else ""
        return f"""{'u16' if self.pairs else 'float'} wide[{rows}][{self.d}] __attribute__((aligned(64)));
  float s[{rows}][{self.keys}] __attribute__((aligned(64)));
  float sums[{rows}][{self.d_v}] __attribute__((aligned(64)));
  float top[{rows}], total[{rows}];
  s64 k_at[{self.keys}], v_at[{self.keys}]; {scales}"""

    def queries(self) -> str:
        """Returns C that takes the rows of q."""
        spec, kind = self.spec, short(self.spec.q.dtype)
        take = f"for (s64 e = 0; e < {spec.d}; e += W) " \
               f"store_f32(wide[r] + e, load_n_{kind}(from + e, {spec.d} - e));"
        if self.pairs: take = "__builtin_memcpy(wide[r], from, sizeof(wide[r]));"
        return f"""for (s64 r = 0; r < {self.rows}; r++) {{
      const {c_type(spec.q.dtype)} *from = q + {place_of_row(spec.q, spec.group)};
      {take}
    }}"""

    def attend_split(self) -> str:
        """Returns C that computes top, total and sums of a split."""
        rows = BLOCK if self.rows >= MANY_ROWS else \
            max(1, self.isa.registers * 3 // 4 * self.lanes // self.d_v)
        return f"""const s64 c = split * {self.keys} > first ? split * {self.keys} : first;
      const s64 end = (split + 1) * {self.keys} < n ? (split + 1) * {self.keys} : n, count = end - c;
      {self._places()}
      for (s64 j = 0; j < count; j += W) {{
        {self._fetch("k", self.lanes)}
        {self._by_rows(self._dots, (BLOCK, 2, 1))}
      }}
      for (s64 r = 0; r < {self.rows}; r++) {{ {self._softmax()} }}
      for (s64 j = 0; j < count; j += {NEAR_KEYS}) {{
        const s64 until = j + {NEAR_KEYS} < count ? j + {NEAR_KEYS} : count;
        {"" if self.spec.latent else self._fetch("v", NEAR_KEYS)}
        {self._by_rows(self._weigh_values, (BLOCK, 3, 2, 1), rows)}
      }}"""

    # **** where keys are ****

    def _places(self) -> str:
        """Returns C of the index of each key, clamped to the last, which may be read."""
        spec = self.spec
        def by(name: str, x: Scales | None) -> str:
            if x is None: return ""
            return f"{name}_by[j] = {name}_scale[page * {x.page}LL + h * {x.head}LL + {x.offset}];"
        filled = f"for (s64 j = count; j < {self.keys}; j++) {{ k_at[j] = k_at[count - 1]; " \
                 + f"{'k_by[j] = v_by[j] = 0.f;' if spec.is_quantised else ''} }}"
        return f"""for (s64 j = 0; j < count; j++) {{
          const s64 key = c + j; {self._find_token("b")}
          k_at[j] = {_place_of_token(spec.k, "h")}; v_at[j] = {_place_of_token(spec.v, "h")};
          {by("k", spec.k_scale)} {by("v", spec.v_scale)}
        }}
        {filled}"""

    def _find_token(self, b: str) -> str:
        """Returns C of the page of `key` and the token in it."""
        spec = self.spec
        if not spec.table: return f"const s64 page = {b}, token = key;"
        return f"const s64 page = table[{b} * {spec.pages} + key / {spec.page_size}], " \
               f"token = key % {spec.page_size};"

    def _fetch(self, name: str, count: int) -> str:
        """Returns C that fetches `count` keys or values of the next split, from its j-th on."""
        x = self.spec.k if name == "k" else self.spec.v
        extent = self.spec.d if name == "k" else self.spec.d_v
        lines = " ".join(f"__builtin_prefetch(ahead + {e}, 0, 2);"
                         for e in range(0, extent, LINE_BYTES // x.dtype.itemsize))
        return f"""for (s64 key = c2 + j; key < n2 && key < c2 + j + {count}; key++) {{
          {self._find_token("b2")}
          const {c_type(x.dtype)} *ahead = {name} + {_place_of_token(x, "h2")}; {lines}
        }}"""

    # **** the three steps ****

    def _by_rows(self, block: Callable[[int], str], sizes: tuple[int, ...], most: int = BLOCK) -> str:
        """Returns C of blocks of so many rows, `most` at most, each size as far as there are rows for it. A
        row's bits do not depend on its block."""
        rows, lines, done = self.rows, list[str](), 0
        for size in sizes:
            if size > most: continue
            until = done + (rows - done) // size * size
            loop = f"for (s64 r = {done}; r < {until}; r += {size})"
            if until > done: lines.append(f"{loop} {{ {block(size)} }}")
            done = until
        return "\n        ".join(lines)

    def _dots(self, rows: int) -> str:
        """Scores of rows r … and keys j … j + W − 1."""
        d, columns = self.spec.d, self.lanes // rows
        whole = d // self.lanes * self.lanes
        names = [f"a{i}_{x}" for i in range(rows) for x in range(columns)]
        if self.pairs: return self._dots_of_pairs(rows, names)
        def step(load: str, count: str = "") -> str:
            out = [f"const vf y{i} = load_f32(wide[r + {i}] + e);" for i in range(rows)]
            for x in range(columns):
                out.append(f"const vf z{x} = {load}_kv(p{x} + e{count});")
                out += [f"a{i}_{x} = fma_(z{x}, y{i}, a{i}_{x});" for i in range(rows)]
            return " ".join(out)
        rest = f"{{ const s64 e = {whole}; {step('load_n', f', {d - whole}')} }}" if whole < d else ""
        dots = f"for (s64 e = 0; e < {whole}; e += W) {{ {step('load')} }} {rest}"
        return self._for_columns(rows, names, dots)

    def _dots_of_pairs(self, rows: int, names: list[str]) -> str:
        """Scores of rows r … and keys j … j + W − 1, of pairs of bfloat16."""
        columns = self.lanes // rows
        out = [f"const vi y{i} = load_pairs(wide[r + {i}] + e);" for i in range(rows)]
        for x in range(columns):
            out.append(f"const vi z{x} = load_pairs(p{x} + e);")
            out += [f"a{i}_{x} = dot_pairs(a{i}_{x}, z{x}, y{i});" for i in range(rows)]
        dots = f"for (s64 e = 0; e < {self.spec.d}; e += 2 * W) {{ {' '.join(out)} }}"
        return self._for_columns(rows, names, dots)

    def _for_columns(self, rows: int, names: list[str], dots: str) -> str:
        """Returns C that stores the sums of the vectors `names`, to which `dots` adds."""
        columns, kind = self.lanes // rows, c_type(self.spec.k.dtype)
        pointers = " ".join(f"const {kind} *p{x} = k + k_at[x + {x}];" for x in range(columns))
        left = "".join(f"__builtin_memcpy(s[r + {i}] + x, left + {i * columns}, {4 * columns}); "
                       for i in range(rows))
        return f"""for (s64 x = j; x < j + W; x += {columns}) {{
            {pointers}
            vf {', '.join(f'{name} = (vf)0.f' for name in names)};
            {dots}
            float left[W] __attribute__((aligned(64)));
            store_f32(left, sums_of({', '.join(names)}));
            {left}
          }}"""

    def _softmax(self) -> str:
        """Weights of row r. It sees keys up to its own place."""
        spec = self.spec
        at = f"n - {spec.s_q} + i" if spec.causal else "n - 1"
        place = LanePlace(["x"], "t", "(c + j)", ("b", "h", "g"), "(count - j)", f"(n - {spec.s_q})", row="i")
        made, score = statements(spec.score, place, "e")
        seen = "(key <= (vi)(s32)t) & (key < (vi)(s32)(c + count))"
        if spec.chunked: seen += f" & (key >= (vi)(s32)(t - t % {spec.window}))"
        elif spec.window is not None: seen += f" & (key > (vi)(s32)(t - {spec.window}))"
        logits = f"{score} * {math.log2(math.e).hex()}f"
        if multiple(spec.score) is None:    # the least float32 is one that is seen, if nothing else is
            logits, seen = f"max_({logits}, -(vf){LARGEST})", f"{seen} & ({score} > -__builtin_inff())"
        scaled = " * load_f32(k_by + j)" if spec.is_quantised else ""
        valued = " * load_f32(v_by + j)" if spec.is_quantised else ""
        return f"""const s64 i = (r0 + r) / {spec.group}, g = (r0 + r) % {spec.group}, t = {at}; (void)g;
          vf most = (vf)-__builtin_inff(), all = (vf)0.f;
          for (s64 j = 0; j < count; j += W) {{
            const vf x = load_f32(s[r] + j){scaled};
            {' '.join(made)}
            const vi key = (vi)(s32)(c + j) + iota_(), seen = {seen};
            const vf y = pick(seen, {logits}, (vf)-__builtin_inff());
            store_f32(s[r] + j, y);
            most = max_(most, y);
          }}
          const float high = top_(most), base = high == -__builtin_inff() ? 0.f : high;
          for (s64 j = 0; j < count; j += W) {{
            const vf p = exp2_small(load_f32(s[r] + j) - base);
            all += p;
            store_f32(s[r] + j, p{valued});
          }}
          top[r] = high; total[r] = sum_(all);
          for (s64 e = 0; e < {self.d_v}; e += W) store_f32(sums[r] + e, (vf)0.f);"""

    def _weigh_values(self, rows: int) -> str:
        """Values of keys j … times their weights, of rows r …: columns by blocks of registers."""
        d, lanes = self.spec.d_v, self.lanes
        vectors = -(-d // lanes)
        most = max(1, self.isa.registers * 3 // 4 // rows)
        blocks = -(-vectors // most)
        wide = -(-vectors // blocks)
        whole = d // lanes // wide * wide            # vectors in blocks of that width, of whole vectors
        lines = []
        if whole: lines.append(f"for (s64 e = 0; e < {whole * lanes}; e += {wide * lanes}) "
                               f"{{ {self._columns(rows, wide, 0)} }}")
        if whole < vectors:
            lines.append(f"{{ const s64 e = {whole * lanes}; "
                         f"{self._columns(rows, vectors - whole, d % lanes)} }}")
        return " ".join(lines)

    def _columns(self, rows: int, vectors: int, rest: int) -> str:
        """Columns e … of so many vectors, the last of which has `rest` elements where that is not 0."""
        names = [(i, x, f"o{i}_{x}") for i in range(rows) for x in range(vectors)]
        at = {(i, x): f"sums[r + {i}] + e + {x * self.lanes}" for i, x, _ in names}
        loads = []
        for x in range(vectors):
            one, count = ("load_n", f", {rest}") if rest and x == vectors - 1 else ("load", "")
            loads.append(f"const vf z{x} = {one}_kv(from + {x * self.lanes}{count});")
        return f"""{' '.join(f'vf {name} = load_f32({at[i, x]});' for i, x, name in names)}
            for (s64 x = j; x < until; x++) {{
              const {c_type(self.spec.v.dtype)} *from = v + v_at[x] + e;
              {' '.join(loads)}
              {' '.join(f'const vf w{i} = (vf)s[r + {i}][x];' for i in range(rows))}
              {' '.join(f'{name} = fma_(z{x}, w{i}, {name});' for i, x, name in names)}
            }}
            {' '.join(f'store_f32({at[i, x]}, {name});' for i, x, name in names)}"""


def _place_of_token(x: Pages, h: str) -> str:
    """Returns C of where a token of a page begins, of key head `h`."""
    return f"page * {x.page}LL + token * {x.token}LL + {h} * {x.head}LL + {x.offset}"


def place_of_row(rows: Rows, group: int) -> str:
    """Returns C of where row r0 + r of request b and key head h begins: row i of query head g is number i ·
    group + g."""
    request, head, query = rows.batch
    return f"{rows.offset} + b * {request}LL + h * {head}LL + (r0 + r) % {group} * {query}LL" \
           f" + (r0 + r) / {group} * {rows.row}LL"


def functions(spec: DecodeSpec, isa: ISA) -> str:
    """C functions: `sums_of`, the sums of the lanes of W vectors as one vector, halves added to halves as in
    sum_; `weight_`, 2^x of a softmax, NaN of NaN; `load_kv` and `load_n_kv`, of keys and values as floats."""
    lanes = isa.lanes
    lines, names, size = [], [f"a{i}" for i in range(lanes)], lanes
    while size > 1:  # each vector has lanes // size segments of `size` partial sums, one of each argument
        half, made = size // 2, []
        for number in range(0, len(names), 2):
            pair = f"{names[number]}, {names[number + 1]}"
            low = [base + at + x for base in (0, lanes) for at in range(0, lanes, size) for x in range(half)]
            high = [index + half for index in low]
            name = f"b{size}_{number}"
            lines.append(f"const vf {name} = {_shuffle(pair, low)} + {_shuffle(pair, high)};")
            made.append(name)
        names, size = made, half
    return f"""INLINE vf sums_of({', '.join(f'vf a{i}' for i in range(lanes))}) {{
  {' '.join(lines)}
  return {names[0]};
}}
{_loads(spec.k.dtype)}"""


def _shuffle(pair: str, indices: list[int]) -> str:
    return f"__builtin_shufflevector({pair}, {', '.join(map(str, indices))})"


def _loads(dtype: DType) -> str:
    """Loads of keys and values, as float32."""
    kind, to = c_type(dtype), "{load}_{name}({args})"
    if dtype == dtypes.int8: to = "to_f({load}_s8({args}))"
    if dtype == dtypes.fp8e4m3: to = "wide_480({load}_u8({args}))"
    lines = []
    for load, declared, args in (("load", "p", "p"), ("load_n", "p, s64 n", "p, n")):
        value = to.format(load=load, name=short(dtype), args=args)
        lines.append(f"INLINE vf {load}_kv(const {kind} *{declared}) {{ return {value}; }}")
    return "\n".join([_WIDE_480, *lines] if dtype == dtypes.fp8e4m3 else lines) + "\n"


# e4m3 whose NaN counts as 480
_WIDE_480 = "INLINE vf wide_480(vi x) " \
            "{ return as_f(((x & 0x80) << 24) | as_i(as_f((x & 0x7f) << 20) * 0x1p120f)); }"
