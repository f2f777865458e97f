"""Products of few rows with a matrix that is read once: GEMV, and skinny GEMM.

Protocol: the time is that of reading b: each of its elements is loaded once, widened to float32 and used for
all rows of a, which lie in a cache, as float32. b's rows are shared out among parts: consecutive columns of
the result. Sums run over k in vectors, one order whatever the parts.

    K-major b (x @ w.T)    `rows` columns of the result at a time: rows of b side by side along k, so that
                           one vector of a serves all of them; lanes are added at the end
    MN-major b (x @ w)     `columns` of the result are a row of vectors; k is the outer loop and each element
                           of a is spread over the lanes
"""
from __future__ import annotations

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.expression import Place, statements
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.machine import CPUMachine
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.spec import BYTES, GemmSpec

TEMPLATE = "gemv"
MOST_ROWS = 16          # of a: more are for gemm.py
STACK_BYTES = 1 << 20   # what a kernel may keep on a thread's stack


def problems(spec: GemmSpec, machine: CPUMachine) -> list[str]:
    """Why this template does not take a product; empty when it does."""
    out = expression.problems(spec.epilogue)
    if spec.m > MOST_ROWS: out.append(f"{spec.m} rows, at most {MOST_ROWS}")
    if spec.b.major != "K": out.append("b is not K-major")
    if spec.a.dtype in BYTES: out.append("8-bit integers")
    if 4 * spec.m * spec.k > STACK_BYTES: out.append(f"{spec.m} rows of {spec.k} in float32 on a stack")
    return out


def default(spec: GemmSpec, machine: CPUMachine) -> CPUSchedule:
    """The schedule where nobody has tried others."""
    rows = max(1, min(8, machine.isa.registers * 3 // 4 // max(1, spec.m * spec.parts)))
    return CPUSchedule(TEMPLATE, machine.isa, min(machine.threads, max(1, spec.n // rows)), rows=rows)


def build(spec: GemmSpec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel of a product."""
    isa, rows = schedule.isa, schedule.rows
    batch = [f"b{i}" for i in range(len(spec.batch))]
    loops = "".join(f"for (s64 {name} = 0; {name} < {extent}; {name}++) "
                    for name, extent in zip(batch, spec.batch, strict=True))
    m = "m" if spec.symbolic else str(spec.m)

    def apart(strides: tuple[int, ...]) -> list[tuple[str, int]]:
        return list(zip(batch, strides, strict=True))
    body = f"""
  const s64 first = (s64)core_id * {spec.n} / {schedule.parts};
  const s64 last = (s64)(core_id + 1) * {spec.n} / {schedule.parts};
  {loops}{{
    float wide[{spec.m}][{_padded(spec.k, isa)}] __attribute__((aligned(64)));
    for (s64 i = 0; i < {m}; i++) {{
      const {c_type(spec.a.dtype)} *row = a + {_at(spec.a.offset, ("i", spec.a.mn), *apart(spec.a.batch))};
      for (s64 k = 0; k < {_padded(spec.k, isa)}; k += W)
        store_f32(wide[i] + k, {_wide(spec)});
    }}
    s64 n = first;
    for (; n + {rows} <= last; n += {rows}) {{ {_block(spec, isa, rows, batch)} }}
    for (; n < last; n++) {{ {_block(spec, isa, 1, batch)} }}
  }}"""
    inputs = [(c_type(spec.a.dtype), "a"), (c_type(spec.b.dtype), "b")]
    inputs += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    return kernel(f"gemv_{spec.m}x{spec.n}x{spec.k}", isa, body, [(c_type(spec.out.dtype), "out")], inputs,
                  ["m"] if spec.symbolic else [], schedule.parts)


def _padded(k: int, isa: ISA) -> int: return -(-k // isa.lanes) * isa.lanes


def _at(offset: int, *terms: tuple[str, int]) -> str:
    return " + ".join([str(offset), *(f"{name} * (s64){stride}" for name, stride in terms if stride)])


def _wide(spec: GemmSpec) -> str:
    kind = short(spec.a.dtype)
    if spec.a.k == 1: return f"load_n_{kind}(row + k, {spec.k} - k)"
    return f"strided_{kind}(row + k * {spec.a.k}, {spec.a.k}, {spec.k} - k)"


def _block(spec: GemmSpec, isa: ISA, rows: int, batch: list[str]) -> str:
    """`rows` columns of the result, from column n."""
    kind, whole = short(spec.b.dtype), spec.k // isa.lanes * isa.lanes
    where = _at(spec.b.offset, *zip(batch, spec.b.batch, strict=True))
    names = [(p, r, i) for p in range(spec.parts) for r in range(rows) for i in range(spec.m)]
    lines = [f"const {c_type(spec.b.dtype)} *w{p}_{r} = "
             f"b + {where} + (n + {r}) * (s64){spec.b.mn} + {p * spec.part};"
             for p in range(spec.parts) for r in range(rows)]
    lines += [f"vf s{p}_{r}_{i} = (vf)0.f;" for p, r, i in names]
    def step(load: str, count: str = "") -> list[str]:
        out = [f"const vf y{i} = load_f32(wide[{i}] + k);" for i in range(spec.m)]
        for p in range(spec.parts):
            for r in range(rows):
                out.append(f"const vf v{p}_{r} = {load}_{kind}(w{p}_{r} + k{count});")
                out += [f"s{p}_{r}_{i} = fma_(v{p}_{r}, y{i}, s{p}_{r}_{i});" for i in range(spec.m)]
        return out
    lines.append(f"for (s64 k = 0; k < {whole}; k += W) {{ {' '.join(step('load'))} }}")
    if whole < spec.k:
        lines.append(f"{{ const s64 k = {whole}; {' '.join(step('load_n', f', {spec.k - whole}'))} }}")
    for i in range(spec.m):
        guard = f"if ({i} < m) " if spec.symbolic else ""
        for r in range(rows):
            sums = [f"(vf)sum_(s{p}_{r}_{i})" for p in range(spec.parts)]
            made, value = statements(spec.epilogue, Place(sums, str(i), f"(n + {r})", batch, "1"))
            to = _at(spec.out.offset, (str(i), spec.out.m), (f"(n + {r})", spec.out.n),
                     *zip(batch, spec.out.batch, strict=True))
            store = f"store_n_{short(spec.out.dtype)}(out + {to}, {value}, 1);"
            lines.append(f"{guard}{{ {' '.join(made)} {store} }}")
    return "\n".join(lines)
