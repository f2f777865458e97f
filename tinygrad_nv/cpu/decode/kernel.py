"""Decode attention over pages or a contiguous cache: keys and values are read once, in splits.

Protocol. Work is shared out by units; each is done by one part from its beginning to its end:

    for each request, key head, block of rows (all: GQA; 32 at most of latents: MLA), split of
    `split_keys` keys:                      split.py
        sums = q kᵀ                        vectors along d, several keys and rows at a time
        weights = softmax of the scores, not yet divided
        out = weights v                    vectors along d
    for each row: fold the splits in their order, from the sink on; divide by the total of the weights

Where requests times key heads keep all threads busy, a unit is a request's key head, or a block of its rows,
and one kernel does it all. Else a unit is one split of it, which leaves sums, top and total in the workspace,
and a second kernel `combine` folds them (Flash-Decoding, Dao et al. 2023). Both fold by the same arithmetic
at the same places, multiples of `split_keys` keys, so that a row's bits are those of its own request alone.
Sums are float32, and so are weights, which are not rounded to q's dtype: nearer to the exact result than the
definition asks.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.decode.split import LARGEST, CPUDecode, SplitText, functions, place_of_row
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, compute_integers, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.kernel import Scratch
from tinygrad_nv.tile.launch import Integer

# keys are read, then values: of 64 keys at a time that took 1.3 times as long
SPLIT_KEYS = 256
STACK_BYTES = 1 << 20   # what a kernel may keep on a thread's stack
LATENT = 256            # elements of a head beyond which rows are divided into blocks of …
BLOCK_ROWS = 32         # … at most so many, which stay in a nearby cache with their sums
UNITS = 4               # parts of a thread, which even out requests of different lengths


@dataclass(frozen=True)
class DecodeKernels:
    """The kernels of a decode attention, launched one after the other with the same parameters, as those of
    `DecodeKernel` (tile/kernel.py)."""
    kernels: tuple[CPUKernel, ...]
    workspace_bytes: int = 0

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """The workspace, where there is one."""
        return Scratch.floats(self.workspace_bytes)


def problems(spec: DecodeSpec, s: CPUDecode) -> list[str]:
    """Why this template does not take a decode attention; empty when it does."""
    out = expression.problems(spec.score)
    if (needed := _stack_bytes(spec, s)) > STACK_BYTES:
        out.append(f"{s.block_rows or spec.rows} rows of {spec.d} + 2 x {spec.d_v} + {s.split_keys} numbers: "
                   f"{needed} bytes of stack, at most {STACK_BYTES}")
    return out


def default(spec: DecodeSpec, target: CPU) -> CPUDecode:
    """The default schedule, where none was tuned. A request's keys are divided among units where key heads
    alone would leave a thread without work."""
    rows = _block_rows(spec) if max(spec.d, spec.d_v) > LATENT else 0
    heads = spec.batch * spec.heads * (spec.rows // rows if rows else 1)
    uneven = -(-heads // target.threads) * target.threads > heads * 1.25
    divided = uneven and spec.longest > SPLIT_KEYS
    units = heads * (-(-spec.longest // SPLIT_KEYS) if divided else 1)
    parts = min(units, UNITS * target.threads) if target.threads > 1 else 1
    return CPUDecode(target.isa, parts, SPLIT_KEYS, rows, divided)


def _block_rows(spec: DecodeSpec) -> int:
    """The largest divisor of all rows up to `BLOCK_ROWS`; 0 for all."""
    if spec.rows <= BLOCK_ROWS: return 0
    return next(count for count in range(BLOCK_ROWS, 0, -1) if spec.rows % count == 0)


def build(spec: DecodeSpec, schedule: CPUDecode, integers: Sequence[Integer] = ()) -> DecodeKernels:
    """The kernels. `integers`, where the length is an argument, says how it is computed from the launch's
    variables."""
    made = _Decode(spec, schedule, integers)
    if not schedule.divided: return DecodeKernels((made.whole(),))
    return DecodeKernels((made.split(), made.combine()), 4 * spec.batch * spec.heads * made.unit_floats)


def _stack_bytes(spec: DecodeSpec, s: CPUDecode) -> int:
    floats = up(spec.d, s.isa.lanes) + 2 * up(spec.d_v, s.isa.lanes) + s.split_keys + 4
    return 4 * (s.block_rows or spec.rows) * floats + 24 * s.split_keys


class _Decode:
    """The kernels of a spec under construction."""

    def __init__(self, spec: DecodeSpec, schedule: CPUDecode, integers: Sequence[Integer]) -> None:
        self.spec, self.schedule, self.isa, self.integers = spec, schedule, schedule.isa, integers
        self.keys, self.rows = schedule.split_keys, schedule.block_rows or spec.rows
        self.splits = -(-spec.longest // self.keys)
        self.d_v = up(spec.d_v, self.isa.lanes)
        self.row_floats = self.d_v + self.isa.lanes    # of the workspace: sums, and top and total after them
        self.unit_floats = self.splits * spec.rows * self.row_floats
        self.part = SplitText(spec, schedule)

    def whole(self) -> CPUKernel:
        """One kernel for everything."""
        rows = self.rows
        return self._kernel("decode", f"""
  {self.part.declare_arrays()}
  float out_sums[{rows}][{self.d_v}] __attribute__((aligned(64))), out_top[{rows}], out_total[{rows}];
  {self._heads(f'''
    if (unit++ % {self.schedule.parts} != core_id) continue;
    {self.part.queries()}
    for (s64 r = 0; r < {rows}; r++) {self._begin_row("out_sums[r]", "out_top[r]", "out_total[r]")}
    for (s64 split = first / {self.keys}; split * {self.keys} < n; split++) {{
      {self._find_next()}
      {self.part.attend_split()}
      for (s64 r = 0; r < {rows}; r++)
        fold(out_sums[r], out_top + r, out_total + r, sums[r], top[r], total[r]);
    }}
    for (s64 r = 0; r < {rows}; r++) {{ {self._store_row("out_sums[r]", "out_total[r]")} }}''')}""")

    def split(self) -> CPUKernel:
        """Units are splits: each leaves its rows in the workspace."""
        return self._kernel("decode_split", f"""
  {self.part.declare_arrays()}
  {self._heads(f'''
    for (s64 split = first / {self.keys}; split * {self.keys} < n; split++) {{
      if (unit++ % {self.schedule.parts} != core_id) continue;
      const s64 b2 = b, h2 = h, c2 = (split + {self.schedule.parts}) * {self.keys}, n2 = n;
      {self.part.queries()}
      {self.part.attend_split()}
      for (s64 r = 0; r < {self.rows}; r++) {{
        float *left = workspace + {self._split_place()};
        for (s64 e = 0; e < {self.d_v}; e += W) store_f32(left + e, load_f32(sums[r] + e));
        left[{self.d_v}] = top[r]; left[{self.d_v + 1}] = total[r];
      }}
    }}''')}""")

    def combine(self) -> CPUKernel:
        """Units are rows: each folds its splits."""
        d = self.d_v
        return self._kernel("decode_combine", f"""
  float out_sums[{d}] __attribute__((aligned(64))), out_top, out_total;
  {self._heads(f'''
    for (s64 r = 0; r < {self.rows}; r++) {{
      if (unit++ % {self.schedule.parts} != core_id) continue;
      {self._begin_row("out_sums", "out_top", "out_total")}
      for (s64 split = first / {self.keys}; split * {self.keys} < n; split++) {{
        const float *left = workspace + {self._split_place()};
        fold(out_sums, &out_top, &out_total, left, left[{d}], left[{d + 1}]);
      }}
      {self._store_row("out_sums", "out_total")}
    }}''')}""")

    def _kernel(self, name: str, body: str) -> CPUKernel:
        spec = self.spec
        outputs = [(c_type(spec.out.dtype), "out"), *[("float", "workspace")] * self.schedule.divided]
        inputs = [(c_type(spec.q.dtype), "q"), (c_type(spec.k.dtype), "k")]
        inputs += [(c_type(spec.v.dtype), "v")] * (not spec.latent)
        inputs += [("s32", "table")] * spec.table + [("s32", "lengths")] * (spec.length == "memory")
        inputs += [("float", "k_scale"), ("float", "v_scale")] * spec.is_quantised
        inputs += [("float", "sinks")] * spec.sinks
        inputs += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
        names, lines = ["length"], ""
        if spec.length != "argument": names = []
        elif self.integers: names, lines = compute_integers(names, self.integers)
        if spec.latent: lines += f"  const {c_type(spec.v.dtype)} *restrict const v = k;\n"
        return kernel(name, self.isa, lines + body, outputs, inputs, names, self.schedule.parts,
                      before=functions(spec, self.isa) + _FOLD.format(d_v=self.d_v))

    def _heads(self, unit: str) -> str:
        """All requests, key heads and blocks of rows, of which `r0` is the first; `n` is a request's length,
        `first` the first key that it sees."""
        spec = self.spec
        return f"""s64 unit = 0;
  for (s64 b = 0; b < {spec.batch}; b++) {{
    const s64 n = {self._length("b")}, first = {self._first("n")};
    for (s64 h = 0; h < {spec.heads}; h++)
    for (s64 r0 = 0; r0 < {spec.rows}; r0 += {self.rows}) {{{unit}
    }}
  }}"""

    def _length(self, b: str) -> str:
        """Returns C of how many keys a request has."""
        spec = self.spec
        given = {"memory": f"lengths[{b}]", "argument": "length", "most": str(spec.longest)}[spec.length]
        return f"({given} < 0 ? 0 : {given} > {spec.longest} ? {spec.longest} : {given})"

    def _first(self, n: str) -> str:
        """Returns C of the first key that a request of n keys sees."""
        spec = self.spec
        first = "0" if spec.window is None else f"({n} > {spec.reach} ? {n} - {spec.reach} : 0)"
        return f"{first} / {spec.window} * {spec.window}" if spec.chunked else first

    def _find_next(self) -> str:
        """Returns C of the split that this thread has next: of this unit, or the first one of another."""
        spec, blocks = self.spec, self.spec.rows // self.rows
        return f"""s64 b2 = b, h2 = h, c2 = (split + 1) * {self.keys}, n2 = n;
      if (c2 >= n) {{
        const s64 next = unit - 1 + {self.schedule.parts};
        b2 = next / {spec.heads * blocks}; h2 = next / {blocks} % {spec.heads};
        n2 = b2 < {spec.batch} ? {self._length("b2")} : 0; c2 = {self._first("n2")};
      }}"""

    def _split_place(self) -> str:
        """Returns C of where a row's split lies in the workspace."""
        unit = f"(b * {self.spec.heads} + h) * {self.splits} + split"
        return f"(({unit}) * {self.spec.rows} + r0 + r) * {self.row_floats}"

    def _begin_row(self, sums: str, top: str, total: str) -> str:
        """Returns C of row r before its first key: nothing, or its sink, of which a weight of 1 has no
        value."""
        group, first, weight = self.spec.group, "-__builtin_inff()", "0.f"
        if self.spec.sinks:
            sink = f"sinks[h * {group} + (r0 + r) % {group}] * {math.log2(math.e).hex()}f"
            first = f"min_((vf)({sink}), (vf){LARGEST})[0]"
            weight = f"{top} == -__builtin_inff() ? 0.f : 1.f"
        return (f"{{ {top} = {first}; {total} = {weight}; "
                f"for (s64 e = 0; e < {self.d_v}; e += W) store_f32({sums} + e, (vf)0.f); }}")

    def _store_row(self, sums: str, total: str) -> str:
        """Returns C that stores the result of row r: its sums divided by their total, zeros where that is
        0."""
        spec, kind = self.spec, short(self.spec.out.dtype)
        whole = spec.d_v // self.isa.lanes * self.isa.lanes
        rest = f"store_n_{kind}(to + {whole}, load_f32({sums} + {whole}) * inverse, {spec.d_v - whole});"
        return f"""{c_type(spec.out.dtype)} *to = out + {place_of_row(spec.out, spec.group)};
      const float inverse = {total} == 0.f ? 0.f : 1.f / {total};
      for (s64 e = 0; e < {whole}; e += W) store_{kind}(to + e, load_f32({sums} + e) * inverse);
      {rest if whole < spec.d_v else ""}"""


# sums, top and total of a row with those of one more split
_FOLD = """
INLINE void fold(float *restrict sums, float *top, float *total, const float *restrict more, float more_top,
                 float more_total) {{
  const float most = more_top > *top ? more_top : *top, base = most == -__builtin_inff() ? 0.f : most;
  const float mine = exp2_small((vf)(*top - base))[0], other = exp2_small((vf)(more_top - base))[0];
  for (s64 e = 0; e < {d_v}; e += W)
    store_f32(sums + e, fma_(load_f32(more + e), (vf)other, load_f32(sums + e) * mine));
  *total = *total * mine + more_total * other;
  *top = most;
}}
"""
