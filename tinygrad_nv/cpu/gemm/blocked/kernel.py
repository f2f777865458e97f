"""Products of many rows: a blocked GEMM of packed operands.

Protocol: after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), and BLIS
(Van Zee and van de Geijn, 2015), with the loops so ordered that one panel of b is all that is packed of it:

    for each tile of block_m x block_n of the result               shared out among parts
      for each block of k
        pack a: block_m x block_k                                  stays in the second cache
        for each part of b, for each panel of `columns` of the tile
          pack b: block_k x columns                                stays in the first cache
          for each strip of `rows`: sums += strip · panel          in registers (micro.py)
      epilogue of the tile's sums, a vector at a time

Sums of a tile lie on the stack in float32 (int32 of bytes), so the epilogue runs once. Tiles do not depend
on the number of parts, nor does the order in which an element is summed. Bfloat16 is multiplied in pairs and
bytes in fours where the processor does that (gemm.h); else every dtype is widened to float32 when packed,
where the sum of 256 products of bytes is exact.

A result whose rows lie side by side is computed as its transpose, since vectors lie along n.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.gemm.blocked.blocks import MOST_BYTES_K, STACK_BYTES, blocks, count_parts
from tinygrad_nv.cpu.gemm.blocked.micro import micro
from tinygrad_nv.cpu.gemm.blocked.pack import packing
from tinygrad_nv.cpu.gemm.layout import PER, kind_of, orient
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

GROUP = 4  # panels of b packed at once, so that as much of each row is read


def problems(spec: GemmSpec, s: CPUGemm) -> list[str]:
    """Why a product cannot have a schedule; empty when it can."""
    named, spec = spec, orient(spec, s.isa)
    kind, lanes = kind_of(spec, s.isa), s.isa.lanes
    needed = (("columns", lanes), ("rows", 1), ("block_m", s.rows), ("block_n", s.columns),
              ("block_k", lanes * PER[kind]))
    out = [f"{name} {value}, a multiple of {of} is needed" for name, of in needed
           if not (value := getattr(s, name)) or (of and value % of)]
    if out := [*expression.problems(named.epilogue), *out]: return out
    vectors = s.columns // lanes
    if (used := vectors * (s.rows + 1) + 1) > s.isa.registers:
        out.append(f"{s.rows}x{s.columns} takes {used} registers, {s.isa.registers} there are")
    if spec.a.dtype in INT8S and kind == "fma" and s.block_k > MOST_BYTES_K:
        out.append(f"sums of {s.block_k} products of bytes in float32, at most {MOST_BYTES_K} are exact")
    if (need := stack_bytes(spec, s)) > STACK_BYTES:
        out.append(f"{need} bytes on a stack, at most {STACK_BYTES}")
    return out


def default(spec: GemmSpec, target: CPU) -> CPUGemm:
    """The default schedule, where none was tuned."""
    spec = orient(spec, target.isa)
    made = blocks(spec, target, PER[kind_of(spec, target.isa)])
    tiles = spec.matrices * -(-spec.m // made.block_m) * -(-spec.n // made.block_n)
    return replace(made, parts=count_parts(spec, tiles, target))


def pitch(block_k: int, per: int, isa: ISA) -> int:
    """Units from a row of packed a to the next: of no multiple of 4 KB, where rows share a cache's sets."""
    return up(block_k // per, isa.lanes) + isa.lanes


def panels(spec: GemmSpec, block_n: int, columns: int) -> int:
    """Columns of b that are packed at once: a panel, several where they lie side by side in memory."""
    return min(up(block_n, columns), GROUP * columns) if spec.b.major == "MN" else columns


def stack_bytes(spec: GemmSpec, s: CPUGemm) -> int:
    """Returns the bytes that a part keeps on the stack: packed a, a panel of b, sums."""
    step = pitch(s.block_k, PER[kind_of(spec, s.isa)], s.isa)
    units = (s.block_m + panels(spec, s.block_n, s.columns)) * step
    return 4 * (units + spec.parts * s.block_m * s.block_n)


def build(spec: GemmSpec, schedule: CPUGemm) -> CPUKernel:
    """The kernel of a product."""
    isa = schedule.isa
    spec, named = orient(spec, isa), spec
    kind = kind_of(spec, isa)
    flip = kind == "quad" and spec.a.dtype == spec.b.dtype
    functions = [packing("a", spec.a, kind, pitch(schedule.block_k, PER[kind], isa), flip=flip),
                 packing("b", spec.b, kind, schedule.columns, up(schedule.block_k // PER[kind], isa.lanes))]
    inputs = [(c_type(spec.a.dtype), "a"), (c_type(spec.b.dtype), "b")]
    if named is not spec: inputs.reverse()
    line = 16 * PER[kind] * spec.b.dtype.itemsize if spec.b.k == 1 else 0
    return assemble(f"gemm_{named.m}x{named.n}x{named.k}", spec, schedule,
                     Operands(functions, inputs, flip, line))


@dataclass(frozen=True)
class Operands:
    """How operands come into panels: C functions, and the pointers they read. `flip`: highest bits of bytes
    are turned. `line`: bytes of 16 units of b where b is fetched ahead, else 0. Calls that pack, of a's rows
    from m0, and of `most` columns of b from n0 + j of part p, from k0 on, where they are not the usual."""
    functions: list[str]
    inputs: list[tuple[str, str]]
    flip: bool = False
    line: int = 0
    pack_a: str = ""
    pack_b: str = ""


def assemble(name: str, spec: GemmSpec, schedule: CPUGemm, operands: Operands) -> CPUKernel:
    """The kernel of a product whose operands are packed so."""
    kind = kind_of(spec, schedule.isa)
    step, whole = pitch(schedule.block_k, PER[kind], schedule.isa), spec.accumulate == dtypes.int32
    # a's bytes have no sign when packed: they are uint8, or int8 turned
    free = (spec.a.dtype == dtypes.uint8) != operands.flip
    before = [header("gemm.h"), *operands.functions,
              micro(schedule, kind, step, whole, free, operands.flip, operands.line)]
    inputs = operands.inputs + [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    return kernel(name, schedule.isa, _body(spec, schedule, operands), [(c_type(spec.out.dtype), "out")],
                  inputs, ["m"] if spec.symbolic else [], schedule.parts, before="\n".join(before))


def _at(offset: int, *terms: tuple[str, int]) -> str:
    return " + ".join([str(offset), *(f"{name} * (s64){stride}" for name, stride in terms if stride)])


def _body(spec: GemmSpec, schedule: CPUGemm, operands: Operands) -> str:
    block_m, block_n, per = schedule.block_m, schedule.block_n, PER[kind_of(spec, schedule.isa)]
    step = pitch(schedule.block_k, per, schedule.isa)
    across, parts = -(-spec.n // block_n), schedule.parts
    batch = [f"b{i}" for i in range(len(spec.batch))]
    index, inner = [], f"(rest / {across})"
    for name, extent in reversed(list(zip(batch, spec.batch, strict=True))):
        index.append(f"const s64 {name} = {inner} % {extent};")
        inner = f"({inner} / {extent})"
    sums = "s32" if spec.accumulate == dtypes.int32 else "float"
    shift = f"s32 shift[{schedule.columns}];" if operands.flip else ""
    deep = up(schedule.block_k // per, schedule.isa.lanes)
    group = panels(spec, block_n, schedule.columns)
    ahead = _prefetch(spec, schedule) if operands.line else ""
    a = _at(spec.a.offset, ("m0", spec.a.mn), ("k0", spec.a.k), *zip(batch, spec.a.batch, strict=True))
    b = _at(spec.b.offset, ("(n0 + j)", spec.b.mn), ("k0", spec.b.k), ("p", spec.part),
            *zip(batch, spec.b.batch, strict=True))
    pack_a = operands.pack_a or f"pack_a(a + {a}, left, rows, strips * {schedule.rows}, deep);"
    pack_b = operands.pack_b or f"const {c_type(spec.b.dtype)} *panels = b + {b};\n" \
                                "        pack_b(panels, right, most, most, deep);"
    return f"""
  u32 left[{block_m * step}] __attribute__((aligned(64)));
  u32 right[{group * deep}] __attribute__((aligned(64)));
  {sums} sums[{spec.parts}][{block_m}][{block_n}] __attribute__((aligned(64)));
  {shift}
  const s64 every = {'m' if spec.symbolic else spec.m}, down = (every + {block_m - 1}) / {block_m};
  const s64 tiles = down * {across * spec.matrices};
  for (s64 t = tiles * core_id / {parts}; t < tiles * (core_id + 1) / {parts}; t++) {{
    const s64 rest = t / down, m0 = t % down * {block_m}, n0 = rest % {across} * {block_n};
    {' '.join(index)}
    const s64 rows = every - m0 < {block_m} ? every - m0 : {block_m};
    const s64 columns = {spec.n} - n0 < {block_n} ? {spec.n} - n0 : {block_n};
    const s64 strips = (rows + {schedule.rows - 1}) / {schedule.rows};
    for (s64 k0 = 0; k0 < {spec.k}; k0 += {schedule.block_k}) {{
      const s64 deep = {spec.k} - k0 < {schedule.block_k} ? {spec.k} - k0 : {schedule.block_k};
      const s64 units = (deep + {per - 1}) / {per};
      {pack_a}
      for (s64 p = 0; p < {spec.parts}; p++) for (s64 j = 0; j < columns; j += {group}) {{
        const s64 most = columns - j < {group} ? columns - j : {group};
        {pack_b}
        for (s64 c = 0; c < most; c += {schedule.columns}) {{
          const u32 *panel = right + c * {deep};
          {'shifts(panel, shift, units);' if shift else ''}
          for (s64 i = 0; i < strips; i++) {{
            {ahead}
            micro(left + i * {schedule.rows * step}, panel, &sums[p][i * {schedule.rows}][j + c], units,
                  !k0{', shift' if shift else ''}{', ahead, apart' if ahead else ''});
          }}
        }}
      }}
    }}
    for (s64 i = 0; i < rows; i++) {{
      s64 j = 0;
      for (; j + W <= columns; j += W) {{ {_finish(spec, batch, '')} }}
      if (j < columns) {{ {_finish(spec, batch, '(columns - j)')} }}
    }}
  }}"""


def _prefetch(spec: GemmSpec, schedule: CPUGemm) -> str:
    """C ahead of strip i: where its loop fetches from, 16 columns in each of the first strips, of the panel
    that is packed next; the others fetch what is there."""
    mn, size, block_k = spec.b.mn, spec.b.dtype.itemsize, schedule.block_k
    return f"""const int fetches = i < {-(-schedule.columns // 16)};
            const {c_type(spec.b.dtype)} *next = panels + {schedule.columns * mn}ll;
            if (j + {schedule.columns} >= columns && k0 + {block_k} < {spec.k})
              next = panels + {block_k} - j * {mn}ll;
            const u8 *ahead = (const u8 *)(fetches ? next + i * {16 * mn}ll : panels);
            const u64 apart = fetches ? {mn * size} : 0;"""


def _finish(spec: GemmSpec, batch: list[str], count: str) -> str:
    """The epilogue of a vector of sums, and its store. `count`: how many lanes count, "" for all."""
    vector = "vi" if spec.accumulate == dtypes.int32 else "vf"
    names = [f"s{p}" for p in range(spec.parts)]
    lines = [f"const {vector} {name} = *(const {vector}_u *)&sums[{p}][i][j];"
             for p, name in enumerate(names)]
    made, value = statements(spec.epilogue, LanePlace(names, "(m0 + i)", "(n0 + j)", batch, count))
    to = "out + " + _at(spec.out.offset, ("(m0 + i)", spec.out.m), ("(n0 + j)", spec.out.n),
                        *zip(batch, spec.out.batch, strict=True))
    name = short(spec.out.dtype)
    if spec.out.n != 1: store = f"scatter_{name}({to}, {spec.out.n}, {value}, {count or 'W'});"
    else: store = f"store_n_{name}({to}, {value}, {count});" if count else f"store_{name}({to}, {value});"
    return " ".join([*lines, *made, store])
