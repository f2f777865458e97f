"""Sums of columns (tile/column_sum/spec.py).

Protocol: parts share out columns, in blocks of `BLOCK` whose sums stay in a cache. Rows are read in order,
`ROWS` of them for each visit of a sum:

    for each block of columns:
      sums = 0
      for rows in steps of ROWS:
        for n in steps of W: sums[n] += term(row, n) + term(row + 1, n) + …

The order of a column's sum depends on the number of rows alone, whatever the parts. What depends on the row
alone the compiler computes once for a block.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.expression import loads, short, walk
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

BLOCK = 512             # columns
LINE = 64               # columns that no two parts share: two cache lines of bfloat16
ROWS = 8
MOST_NODES = 96         # of the terms of a step, with which they still compile in no time
PART_ELEMENTS = 1 << 14     # fewer are done before another thread has begun


class CPUColumnSum(CPUSchedule):
    """Shares of columns."""
    template: ClassVar[str] = "column_sum"


def problems(spec: ColumnSumSpec, s: CPUColumnSum) -> list[str]:
    """Why this template does not take a spec; empty when it does."""
    out = expression.problems(spec.term)
    if any(load.n not in (0, 1) for load in loads(spec.term)): out.append("elements of a row lie apart")
    return out


def default(spec: ColumnSumSpec, target: CPU) -> CPUColumnSum:
    """The default schedule, where none was tuned."""
    most = min(-(-spec.n // LINE), spec.m * spec.n // PART_ELEMENTS)
    return CPUColumnSum(target.isa, max(1, min(target.threads, most)))


def build(spec: ColumnSumSpec, s: CPUColumnSum) -> CPUKernel:
    """The kernel of sums of columns."""
    rows = ROWS
    while rows > 1 and rows * sum(1 for _ in walk(spec.term)) > MOST_NODES: rows //= 2
    lines, lanes = -(-spec.n // LINE), s.isa.lanes
    body = f"""
  const s64 from = {lines}ll * core_id / {s.parts} * {LINE};
  const s64 upto = {lines}ll * (core_id + 1) / {s.parts} * {LINE};
  const s64 end = upto < {spec.n} ? upto : {spec.n};
  for (s64 first = from; first < end; first += {BLOCK}) {{
    const s64 width = end - first < {BLOCK} ? end - first : {BLOCK};
    float sums[{BLOCK + lanes}] __attribute__((aligned(64)));
    for (s64 c = 0; c < width; c += W) store_f32(sums + c, (vf)0.f);
    s64 row = 0;
    for (; row + {rows} <= {spec.m}; row += {rows}) {{{_step(spec, rows)}}}
    for (; row < {spec.m}; row++) {{{_step(spec, 1)}}}
    for (s64 c = 0; c < width; c += W) {{
      const s64 count = width - c < W ? width - c : W;
      store_n_{short(spec.dtype)}(out + first + c, load_f32(sums + c), count);
    }}
  }}"""
    inputs = [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    return kernel(f"column_sum_{spec.m}x{spec.n}", s.isa, body, [(c_type(spec.dtype), "out")], inputs,
                  parts=s.parts)


def _step(spec: ColumnSumSpec, rows: int) -> str:
    """C: the terms of some rows, added to all sums of a block."""
    def terms(count: str) -> str:
        lines, names = list[str](), list[str]()
        for r in range(rows):
            made, name = statements(spec.term, LanePlace((), f"(row + {r})", "(first + c)", (), count),
                                    f"r{r}_")
            lines += made
            names.append(name)
        while len(names) > 1:
            names = [f"({a} + {b})" for a, b in zip(names[::2], names[1::2], strict=True)]
        return "\n".join([*lines, f"store_f32(sums + c, load_f32(sums + c) + {names[0]});"])
    return f"""
      s64 c = 0;
      for (; c + W <= width; c += W) {{
        {terms("")}
      }}
      if (c < width) {{
        const s64 count = width - c;
        {terms("count")}
      }}
    """


COLUMN_SUM = template(ColumnSumSpec, CPUColumnSum, default, problems, __name__)
FAMILY = Family("column_sum", (COLUMN_SUM,), determinism_class=OVER_ROWS)
