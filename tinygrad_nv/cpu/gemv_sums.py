"""The sums of a product of few rows: columns of one chunk, by how b lies.

Protocol: C that fills `sums[p · m + i][c]` for `count` columns from column n0, where `Operands` has declared a.

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

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import c_type
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.spec import BYTES, GemmSpec


def at(offset: int, *terms: tuple[str, int]) -> str:
    """An index in C: the sum of an offset and of names times strides."""
    return " + ".join([str(offset), *(f"(s64){name} * {stride}" for name, stride in terms if stride)])


def apart(strides: Iterable[int]) -> list[tuple[str, int]]:
    """The terms of a batch: its indices are b0, b1, …"""
    return [(f"b{i}", stride) for i, stride in enumerate(strides)]


@dataclass(frozen=True)
class Operands:
    """How a and b are read. `direct`: a is read as it lies, else from `wide`, a copy of accumulators' type
    whose rows beyond a symbolic m are 0."""
    spec: GemmSpec
    isa: ISA
    direct: bool

    @property
    def integers(self) -> bool: return self.spec.a.dtype in BYTES

    @property
    def vector(self) -> str: return "vi" if self.integers else "vf"

    @property
    def padded(self) -> int:
        # 64 bytes more: rows at distances of a power of two would share sets of the cache
        return -(-self.spec.k // self.isa.lanes) * self.isa.lanes + 16

    @property
    def element(self) -> str:
        """The C type of what rows of a are read as."""
        return c_type(self.spec.a.dtype) if self.direct else "s32" if self.integers else "float"

    def declared(self) -> str:
        """Ahead of all chunks."""
        if self.direct: return ""
        return f"{self.element} wide[{self.spec.m}][{self.padded}] __attribute__((aligned(64)));"

    def widened(self) -> str:
        """Where a new product begins."""
        spec = self.spec
        if self.direct: return ""
        kind, k = short(spec.a.dtype), spec.a.k
        value = f"load_n_{kind}(row + k, {spec.k} - k)" if k == 1 else \
            f"strided_{kind}(row + k * {k}, {k}, {spec.k} - k)"
        store = f"store_{'s32' if self.integers else 'f32'}(wide[i] + k, "
        steps = f"for (s64 k = 0; k < {spec.k}; k += W)"
        zeros = f"for (s64 i = m; i < {spec.m}; i++) {steps} {store}({self.vector})0);" if spec.symbolic else ""
        return f"""for (s64 i = 0; i < {'m' if spec.symbolic else spec.m}; i++) {{
      const {c_type(spec.a.dtype)} *row = a + {at(spec.a.offset, ('i', spec.a.mn), *apart(spec.a.batch))};
      {steps} {store}{value});
    }} {zeros}"""

    def row(self, i: int) -> str:
        """Where row i of a begins."""
        spec = self.spec
        return f"a + {at(spec.a.offset + i * spec.a.mn, *apart(spec.a.batch))}" if self.direct else f"wide[{i}]"

    @property
    def kind(self) -> str:
        """The short name of what rows of a are read as."""
        return short(self.spec.a.dtype) if self.direct else "s32" if self.integers else "f32"

    def b(self, part: int, *terms: tuple[str, int]) -> str:
        """A place in b."""
        spec = self.spec
        return f"b + {at(spec.b.offset + part * spec.part, *apart(spec.b.batch), *terms)}"

    def added(self, total: str, x: str, y: str) -> str:
        """total + x y."""
        return f"{total} + {x} * {y}" if self.integers else f"fma_({x}, {y}, {total})"


# **** rows of b along k ****

def sums_of_rows(o: Operands, schedule: CPUSchedule) -> str:
    """C for a b whose rows lie along k, or in no order."""
    rows, tiles = schedule.rows, range(0, o.spec.m, schedule.block_m)
    many = " ".join(_tile(o, rows, range(i, min(i + schedule.block_m, o.spec.m))) for i in tiles)
    one = " ".join(_tile(o, 1, range(i, min(i + schedule.block_m, o.spec.m))) for i in tiles)
    return f"""{{
      const s64 apart = count / {rows};
      for (s64 c = 0; c < apart; c++) {{ {many} }}
      for (s64 c = apart * {rows}; c < count; c++) {{ {one} }}
    }}"""


def _tile(o: Operands, rows: int, tile: range) -> str:
    """`rows` columns from c, `apart` from each other, and the rows of a in `tile`."""
    spec, whole = o.spec, o.spec.k // o.isa.lanes * o.isa.lanes
    lanes = [(p, r) for p in range(spec.parts) for r in range(rows)]
    lines = [f"const {c_type(spec.b.dtype)} *w{p}_{r} = {o.b(p, (f'(n0 + c + {r} * apart)', spec.b.mn))};"
             for p, r in lanes]
    lines += [f"const {o.element} *a{i} = {o.row(i)};" for i in tile]
    lines += [f"{o.vector} s{p}_{r}_{i} = ({o.vector})0;" for p, r in lanes for i in tile]

    def step(count: str) -> str:
        name = "load_n" if count else "load"
        out = [f"const {o.vector} y{i} = {name}_{o.kind}(a{i} + k{count});" for i in tile]
        for p, r in lanes:
            where = f"{name}_{short(spec.b.dtype)}(w{p}_{r} + k{count})" if spec.b.k == 1 else \
                f"strided_{short(spec.b.dtype)}(w{p}_{r} + k * {spec.b.k}, {spec.b.k}{count or ', W'})"
            out.append(f"const {o.vector} v{p}_{r} = {where};")
            out += [f"{s} = {o.added(s, f'v{p}_{r}', f'y{i}')};" for i in tile for s in [f"s{p}_{r}_{i}"]]
        return " ".join(out)
    if whole: lines.append(f"for (s64 k = 0; k < {whole}; k += W) {{ {step('')} }}")
    if whole < spec.k: lines.append(f"{{ const s64 k = {whole}; {step(f', {spec.k - whole}')} }}")
    for p in range(spec.parts):
        for i in tile: lines += _added_lanes(o, [f"s{p}_{r}_{i}" for r in range(rows)], p * spec.m + i)
    return f"{{ {' '.join(lines)} }}"


def _added_lanes(o: Operands, names: list[str], row: int) -> list[str]:
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

def sums_of_columns(o: Operands, schedule: CPUSchedule) -> str:
    """C for a b whose columns lie side by side."""
    spec, name = o.spec, "s32" if o.integers else "f32"
    rows = min(schedule.rows, spec.k)
    return f"""for (s64 i = 0; i < {spec.parts * spec.m}; i++)
      for (s64 c = 0; c < count; c += W) store_{name}(sums[i] + c, ({o.vector})0);
    for (s64 k = 0; k < {spec.k // rows}; k++) {{ {_pass(o, rows, spec.k // rows)} }}
    for (s64 k = {spec.k // rows * rows}; k < {spec.k}; k++) {{ {_pass(o, 1, 0)} }}"""


def _pass(o: Operands, rows: int, distance: int) -> str:
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
                out += [f"s = {o.added('s', f'v{p}_{r}', f'y{i}_{r}')};" for r in range(rows)]
                out.append(f"store_{name}({place}, s); }}")
        return " ".join(out)
    return f"""{' '.join(lines)}
      s64 c = 0;
      for (; c + W <= count; c += W) {{ {step('')} }}
      if (c < count) {{ {step(', count - c')} }}"""
