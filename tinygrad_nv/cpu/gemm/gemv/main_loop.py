"""The sums of a product of few rows: columns of one chunk, by how b lies.

Protocol: C that fills `sums[p · m + i][c]` for `count` columns from column n0, where `GemvOperands` has
declared a.

    sums_of_rows       b's rows lie along k (x @ w.T). `rows` columns at a time, whose rows are far from each
                       other: memory is read as so many long streams. (Four neighbouring rows of 8 KB were
                       read at 15 GB/s where four far ones came at 24.) One vector of a serves all of them.
                       The lanes of four sums are added together, halves to halves
    sums_of_columns    b's columns lie side by side (x @ w). k is the outer loop, `rows` of it at a time and
                       far from each other for the same reason; lanes are columns, and each element of a is
                       spread over them
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinygrad_nv.cpu.gemm.schedules import CPUGemv
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import C_TYPES, c_type
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

FEWEST_FETCHED = 4  # rows of a: with more, the processor's own fetching does not keep up with the pauses
NEIGHBOURS = 4  # columns of a stream that are summed together in blocks of k


def at(offset: int, *terms: tuple[str, int]) -> str:
    """An index in C: the sum of an offset and of names times strides."""
    return " + ".join([str(offset), *(f"(s64){name} * {stride}" for name, stride in terms if stride)])


def apart(strides: Iterable[int]) -> list[tuple[str, int]]:
    """The terms of a batch: its indices are b0, b1, …"""
    return [(f"b{i}", stride) for i, stride in enumerate(strides)]


@dataclass(frozen=True)
class GemvOperands:
    """How a and b are read. `direct`: a is read as it lies, else from `wide`, a copy whose rows beyond a
    symbolic m are 0. `pairs`: both stay bfloat16, for instructions that multiply pairs; else they become
    float32, or int32."""
    spec: GemmSpec
    isa: ISA
    direct: bool
    pairs: bool = False

    @property
    def integers(self) -> bool: return self.spec.a.dtype in INT8S

    @property
    def vector(self) -> str: return "vi" if self.integers else "vf"

    @property
    def step(self) -> int:
        """Elements of k in a vector."""
        return self.isa.lanes * (2 if self.pairs else 1)

    @property
    def kind(self) -> str:
        """The short name of what rows of a are read as."""
        if self.direct or self.pairs: return short(self.spec.a.dtype)
        return "s32" if self.integers else "f32"

    @property
    def element(self) -> str: return C_TYPES[self.kind]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a as it is read."""
        return self.spec.k * (self.spec.a.dtype.itemsize if self.direct or self.pairs else 4)

    def declare_arrays(self) -> str:
        """Returns C ahead of all chunks."""
        return "" if self.direct else \
            f"{self.element} wide[{self.spec.m}][{self.width}] __attribute__((aligned(64)));"

    @property
    def width(self) -> int:
        """Elements from a row of the copy to the next: 64 bytes more than it has, as rows at distances of a
        power of two would share sets of the cache."""
        return -(-self.spec.k // self.step) * self.step + 32

    def widen_rows(self) -> str:
        """Returns C where a new product begins."""
        spec = self.spec
        if self.direct: return ""
        kind, k = short(spec.a.dtype), spec.a.k
        value = f"load_n_{kind}(row + k, {spec.k} - k)" if k == 1 else \
            f"strided_{kind}(row + k * {k}, {k}, {spec.k} - k)"
        steps, store = f"for (s64 k = 0; k < {spec.k}; k += W)", f"store_{self.kind}(wide[i] + k, "
        if self.pairs and k == 1:
            steps = f"for (s64 k = 0; k < {spec.k}; k += 2 * W)"
            value, store = f"load_n_pairs(row + k, {spec.k} - k)", "*(vi_u *)(wide[i] + k) = ("
        zero = "(vi)0" if self.pairs and k == 1 else f"({self.vector})0"
        zeros = f"for (s64 i = m; i < {spec.m}; i++) {steps} {store}{zero});"
        return f"""for (s64 i = 0; i < {'m' if spec.symbolic else spec.m}; i++) {{
      const {c_type(spec.a.dtype)} *row = a + {at(spec.a.offset, ('i', spec.a.mn), *apart(spec.a.batch))};
      {steps} {store}{value});
    }} {zeros if spec.symbolic else ''}"""

    def row(self, i: int | str) -> str:
        """Returns C of where row i of a begins: a number, or a name in C."""
        spec = self.spec
        if not self.direct: return f"wide[{i}]"
        return f"a + {at(spec.a.offset, (str(i), spec.a.mn), *apart(spec.a.batch))}"

    def b(self, part: int, *terms: tuple[str, int]) -> str:
        """A place in b."""
        spec = self.spec
        return f"b + {at(spec.b.offset + part * spec.part, *apart(spec.b.batch), *terms)}"

    def multiply_add(self, total: str, x: str, y: str) -> str:
        """Returns C of total + x y."""
        if self.pairs: return f"dot_pairs({total}, {x}, {y})"
        return f"{total} + {x} * {y}" if self.integers else f"fma_({x}, {y}, {total})"


# **** rows of b along k ****

def sums_of_rows(o: GemvOperands, schedule: CPUGemv) -> str:
    """C for a b whose rows lie along k, or in no order. With a `block_k`, `NEIGHBOURS` columns of each stream
    are summed over so much of k before they go on: that part of a stays in the L1 cache meanwhile."""
    rows, spec = schedule.rows, o.spec
    tiles = [range(i, min(i + schedule.block_m, spec.m)) for i in range(0, spec.m, schedule.block_m)]
    one = " ".join(_tile(o, 1, tile) for tile in tiles)
    fetches = spec.m > FEWEST_FETCHED and spec.b.k == 1
    many = " ".join(_tile(o, rows, tile, fetches=fetches and not tile.start) for tile in tiles)
    ahead = f"const s64 ahead = {spec.b.mn};" if fetches else ""
    loop = f"for (s64 c = 0; c < apart; c++) {{ {ahead} {many} }}"
    if 0 < schedule.block_k < spec.k: loop = _blocks(o, rows, tiles, schedule.block_k)
    return f"""{{
      const s64 apart = count / {rows};
      {loop}
      for (s64 c = apart * {rows}; c < count; c++) {{ {one} }}
    }}"""


def _blocks(o: GemvOperands, rows: int, tiles: list[range], block_k: int) -> str:
    spec, number = o.spec, o.spec.parts * rows * o.spec.m
    ahead = f"(j + 1 < most ? {spec.b.mn} : {block_k} - j * (s64){spec.b.mn})"

    def each(k: str, last: bool) -> str:
        inner = " ".join(_tile(o, rows, tile, block_k, last, True) for tile in tiles)
        return f"""for (s64 j = 0; j < most; j++) {{
          const s64 c = c0 + j, k0 = {k}, ahead = {ahead};
          {o.vector} *const held = totals[j]; {inner}
        }}"""
    whole = (spec.k - 1) // block_k * block_k
    return f"""for (s64 c0 = 0; c0 < apart; c0 += {NEIGHBOURS}) {{
        {o.vector} totals[{NEIGHBOURS}][{number}];
        const s64 most = apart - c0 < {NEIGHBOURS} ? apart - c0 : {NEIGHBOURS};
        for (s64 j = 0; j < most; j++) for (s64 i = 0; i < {number}; i++) totals[j][i] = ({o.vector})0;
        for (s64 kb = 0; kb < {whole}; kb += {block_k}) {each("kb", False)}
        {each(str(whole), True)}
      }}"""


def _tile(o: GemvOperands, rows: int, tile: range, block_k: int = 0, last: bool = True,
          fetches: bool = False) -> str:
    """`rows` columns from c, `apart` from each other, and the rows of a in `tile`: all of k; or one block of
    it, from and (but for the `last`) to vectors `held`. `fetches` what of b is `ahead`."""
    spec = o.spec
    begin = (spec.k - 1) // block_k * block_k if block_k and last else 0
    end = spec.k if last else block_k
    whole = (end - begin) // o.step * o.step
    lanes = [(p, r) for p in range(spec.parts) for r in range(rows)]
    start = [("k0", spec.b.k)] if block_k else []
    lines = [f"const {c_type(spec.b.dtype)} *w{p}_{r} = "
             f"{o.b(p, (f'(n0 + c + {r} * apart)', spec.b.mn), *start)};" for p, r in lanes]
    lines += [f"const {o.element} *a{i} = {o.row(i)}{' + k0' if block_k else ''};" for i in tile]
    names = {(p, r, i): f"s{p}_{r}_{i}" for p, r in lanes for i in tile}
    place = {key: f"held[{(key[0] * rows + key[1]) * spec.m + key[2]}]" for key in names}
    lines += [f"{o.vector} {name} = {place[key] if block_k else f'({o.vector})0'};"
              for key, name in names.items()]

    def step(count: str) -> str:
        # vectors of the side that has fewer stay in registers, those of the other pass by one at a time
        kind, b = "vi" if o.pairs else o.vector, short(spec.b.dtype)
        ys = {i: f"const {kind} y{i} = {_vector(o, f'a{i}', o.kind, 1, count)};" for i in tile}
        vs = {(p, r): f"const {kind} v{p}_{r} = {_vector(o, f'w{p}_{r}', b, spec.b.k, count)};"
              for p, r in lanes}
        out = [f"__builtin_prefetch(w{p}_{r} + k + ahead, 0, 2);" for p, r in lanes if fetches and not count]
        added = {key: f"{s} = {o.multiply_add(s, f'v{key[0]}_{key[1]}', f'y{key[2]}')};" for key,
                 s in names.items()}
        if len(lanes) < len(tile):
            out += vs.values()
            for i in tile: out += [ys[i], *(added[p, r, i] for p, r in lanes)]
        else:
            out += ys.values()
            for p, r in lanes: out += [vs[p, r], *(added[p, r, i] for i in tile)]
        return " ".join(out)
    if whole: lines.append(f"for (s64 k = 0; k < {whole}; k += {o.step}) {{ {step('')} }}")
    if whole < end - begin: lines.append(f"{{ const s64 k = {whole}; {step(str(end - begin - whole))} }}")
    if not last: return f"{{ {' '.join([*lines, *(f'{place[key]} = {s};' for key, s in names.items())])} }}"
    for p in range(spec.parts):
        for i in tile: lines += _add_lanes(o, [names[p, r, i] for r in range(rows)], p * spec.m + i)
    return f"{{ {' '.join(lines)} }}"


def _vector(o: GemvOperands, pointer: str, kind: str, stride: int, count: str) -> str:
    """A vector of elements from k on, all of it or `count` of them."""
    if stride != 1: return f"strided_{kind}({pointer} + k * {stride}, {stride}, {count or 'W'})"
    name = "pairs" if o.pairs else kind
    return f"load_n_{name}({pointer} + k, {count})" if count else f"load_{name}({pointer} + k)"


def _add_lanes(o: GemvOperands, names: list[str], row: int) -> list[str]:
    """The lanes of some columns' sums, four columns at a time."""
    if o.integers: return [f"sums[{row}][c + {r} * apart] = sum_i({name});" for r, name in enumerate(names)]
    if len(names) == 1: return [f"sums[{row}][c] = sum_({names[0]});"]
    out = []
    for first in range(0, len(names), 4):
        four = (names[first:first + 4] * 4)[:4]
        out.append(f"{{ const vf4 t = sum4_({', '.join(four)});")
        out += [f"sums[{row}][c + {first + j} * apart] = t[{j}];" for j in range(min(4, len(names) - first))]
        out.append("}")
    return out


# **** columns of b side by side ****

def sums_of_columns(o: GemvOperands, schedule: CPUGemv) -> str:
    """C for a b whose columns lie side by side. With a `block_k`, `columns` of them stay in registers for so
    much of k, while the same columns of the next block are fetched."""
    spec, name = o.spec, "s32" if o.integers else "f32"
    rows = min(schedule.rows, spec.k)
    passes = _column_blocks(o, schedule) if schedule.block_k else f"""
    for (s64 k = 0; k < {spec.k // rows}; k++) {{ {_pass(o, rows, spec.k // rows)} }}
    for (s64 k = {spec.k // rows * rows}; k < {spec.k}; k++) {{ {_pass(o, 1, 0)} }}"""
    return f"""for (s64 i = 0; i < {spec.parts * spec.m}; i++)
      for (s64 c = 0; c < count; c += W) store_{name}(sums[i] + c, ({o.vector})0);
    {passes}"""


def _column_blocks(o: GemvOperands, schedule: CPUGemv) -> str:
    spec, many = o.spec, max(1, schedule.columns // o.isa.lanes)
    tiles = [(p, range(i, min(i + schedule.block_m, spec.m)))
             for p in range(spec.parts) for i in range(0, spec.m, schedule.block_m)]
    return f"""for (s64 k0 = 0; k0 < {spec.k}; k0 += {schedule.block_k}) {{
      const s64 most = {spec.k} - k0 < {schedule.block_k} ? {spec.k} - k0 : {schedule.block_k};
      s64 c = 0;
      for (; c + {many} * W <= count; c += {many} * W) {{
        {' '.join(_column_tile(o, p, tile, many, schedule.block_k) for p, tile in tiles)}
      }}
      for (; c < count; c += W) {{
        const s64 left = count - c;
        {' '.join(_column_tile(o, p, tile, 0, schedule.block_k) for p, tile in tiles)}
      }}
    }}"""


def _column_tile(o: GemvOperands, part: int, tile: range, many: int, block_k: int) -> str:
    """Adds a block of k to `many` vectors of columns, or to the one that is `left` (0)."""
    spec, kind, name = o.spec, short(o.spec.b.dtype), "s32" if o.integers else "f32"
    vectors, each_line = range(max(many, 1)), max(1, 64 // (spec.b.dtype.itemsize * o.isa.lanes))
    lines = [f"const {c_type(spec.b.dtype)} *w = {o.b(part, ('k0', spec.b.k), ('(n0 + c)', spec.b.mn))};"]
    lines += [f"const {o.element} *a{i} = {o.row(i)} + k0;" for i in tile]
    names = {(i, v): f"s{i}_{v}" for i in tile for v in vectors}
    place = {(i, v): f"sums[{part * spec.m + i}] + c + {v} * W" for i, v in names}
    lines += [f"{o.vector} {s} = load_{name}({place[key]});" for key, s in names.items()]
    step = [f"__builtin_prefetch(w + {block_k * spec.b.k}ll + {v} * W, 0, 2);"
            for v in vectors if v % each_line == 0]
    step += [f"const {o.vector} v{v} = load_{kind}(w + {v} * W);" for v in vectors] if many else \
        [f"const {o.vector} v0 = load_n_{kind}(w, left);"]
    for i in tile:
        step.append(f"{{ const {o.vector} y = ({o.vector})one_{o.kind}(a{i} + k);")
        step += [f"{s} = {o.multiply_add(s, f'v{v}', 'y')};" for v in vectors for s in [names[i, v]]]
        step.append("}")
    lines.append(f"for (s64 k = 0; k < most; k++, w += {spec.b.k}) {{ {' '.join(step)} }}")
    lines += [f"store_{name}({place[key]}, {s});" for key, s in names.items()]
    return f"{{ {' '.join(lines)} }}"


def _pass(o: GemvOperands, rows: int, distance: int) -> str:
    """Adds `rows` of k, `distance` from each other, to all sums of the chunk."""
    spec, kind = o.spec, short(o.spec.b.dtype)
    lines = [f"const {o.vector} y{i}_{r} = ({o.vector})one_{o.kind}({o.row(i)} + k + {r * distance});"
             for i in range(spec.m) for r in range(rows)]
    lines += [f"const {c_type(spec.b.dtype)} *w{p}_{r} = "
              f"{o.b(p, (f'(k + {r * distance})', spec.b.k), ('n0', spec.b.mn))};"
              for p in range(spec.parts) for r in range(rows)]

    def step(count: str) -> str:
        load, name = "load_n" if count else "load", "s32" if o.integers else "f32"
        out = []
        for p in range(spec.parts):
            out += [f"const {o.vector} v{p}_{r} = {load}_{kind}(w{p}_{r} + c{count});" for r in range(rows)]
            for i in range(spec.m):
                place = f"sums[{p * spec.m + i}] + c"
                out.append(f"{{ {o.vector} s = load_{name}({place});")
                out += [f"s = {o.multiply_add('s', f'v{p}_{r}', f'y{i}_{r}')};" for r in range(rows)]
                out.append(f"store_{name}({place}, s); }}")
        return " ".join(out)
    return f"""{' '.join(lines)}
      s64 c = 0;
      for (; c + W <= count; c += W) {{ {step('')} }}
      if (c < count) {{ {step(', count - c')} }}"""
