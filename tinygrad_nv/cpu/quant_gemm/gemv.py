"""Few rows times a quantised matrix, which is read once.

Protocol: elements are decoded (decode.py), W columns of `rows` outputs at a time, and each is multiplied by
all rows of a, which lie in float32 in the workspace's part of a part.

    widen a: rows in float32, columns in the matrix's order
    for each chunk of outputs of a part, `rows` of them at a time
      for each run of columns of one scale
        factors of the outputs
        sums[i] += a[i] · weight(value, factors)        lanes along k
      add up lanes
    out = epilogue(sums)

Sums have one order, that of the spec and the instruction set. Their products are those of dequantised
elements in float32.
"""
from __future__ import annotations

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.gemm.gemv.kernel import epilogue
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel, up
from tinygrad_nv.cpu.quant_gemm import decode
from tinygrad_nv.cpu.quant_gemm.schedules import QuantGemv
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

MOST_ROWS = 16              # more are for blocked.py
PARTS = 4                   # for each thread, so that one that is held up does less
BYTES_OF_PART = 64 << 10    # of codes; waking a thread takes as long as reading so much


def problems(spec: QuantGemmSpec, s: QuantGemv) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    out = decode.untaken(spec) + expression.problems(spec.gemm.epilogue)
    if spec.gemm.m > MOST_ROWS: out.append(f"{spec.gemm.m} rows, at most {MOST_ROWS}")
    out += [f"{name} 0" for name in ("block_m", "block_n", "rows") if not getattr(s, name)]
    return out


def default(spec: QuantGemmSpec, target: CPU) -> QuantGemv:
    """The default schedule."""
    gemm, registers = spec.gemm, target.isa.registers
    block_m = min(gemm.m, registers // 4)
    rows = max(1, min(4, registers // (2 * block_m)))
    nbytes = gemm.n * gemm.k * spec.type.bits // 8
    parts = max(1, min(target.threads * PARTS if target.threads > 1 else 1, nbytes // BYTES_OF_PART))
    block_n = min(256, up(-(-gemm.n // parts), target.isa.lanes))
    return QuantGemv(target.isa, min(parts, -(-gemm.n // block_n)), block_m, block_n, rows)


def build(spec: QuantGemmSpec, s: QuantGemv) -> CPUKernel:
    """The kernel."""
    gemm, (n, k), lanes = spec.gemm, spec.shape, s.isa.lanes
    wide, chunks = up(k, lanes) + lanes, -(-gemm.n // s.block_n)
    rows = "m" if gemm.symbolic else str(gemm.m)
    body = f"""
  {decode.declare_matrix(spec.buffers)}
  float *wide = (float *)work + core_id * {gemm.m * wide}ll;
  for (s64 i = 0; i < {rows}; i++) {{ {_widen_row(spec, wide)} }}
  for (s64 i = {rows}; i < {gemm.m}; i++) for (s64 k = 0; k < {wide}; k++) wide[i * {wide} + k] = 0;
  float sums[{gemm.parts * gemm.m}][{up(s.block_n, lanes)}] __attribute__((aligned(64)));
  const s64 end = (s64)(core_id + 1) * {chunks} / {s.parts};
  for (s64 item = (s64)core_id * {chunks} / {s.parts}; item < end; item++) {{
    const s64 n0 = item * {s.block_n};
    const s64 count = {gemm.n} - n0 < {s.block_n} ? {gemm.n} - n0 : {s.block_n};
    for (s64 p = 0; p < {gemm.parts}; p++) {{
      s64 c = 0;
      {_tiles(spec, s, s.rows, wide)}
      {_tiles(spec, s, 1, wide) if s.rows > 1 else ''}
    }}
    {epilogue(gemm)}
  }}"""
    inputs = [(c_type(gemm.a.dtype), "a"), *decode.pointers(spec.buffers),
              *((c_type(dtype), f"x{i}") for i, dtype in enumerate(gemm.parameters))]
    outputs, integers = [(c_type(gemm.out.dtype), "out"), ("float", "work")], ["m"] if gemm.symbolic else []
    return kernel(f"quant_gemv_{gemm.m}x{gemm.n}x{gemm.k}", s.isa, body, outputs, inputs, integers, s.parts,
                  4 * s.parts * gemm.m * wide, decode.functions(spec.type, n, k, lanes))


def _widen_row(spec: QuantGemmSpec, wide: int) -> str:
    """C that copies row i of a into `wide`, zeros behind it."""
    a, k = spec.gemm.a, spec.gemm.k
    kind, row = short(a.dtype), f"a + {a.offset} + i * {a.mn}ll"
    ends = f"for (s64 k = {k}; k < {wide}; k++) wide[i * {wide} + k] = 0;"
    if spec.type.permuted:
        one = f"one_{kind}({row} + order[k] * {a.k}ll)"
        return f"for (s64 k = 0; k < {k}; k++) wide[i * {wide} + k] = {one}; {ends}"
    load = f"load_n_{kind}({row} + k, {k} - k)" if a.k == 1 else \
        f"strided_{kind}({row} + k * {a.k}ll, {a.k}, {k} - k)"
    return f"for (s64 k = 0; k < {k}; k += W) store_f32(wide + i * {wide} + k, {load}); {ends}"


def _tiles(spec: QuantGemmSpec, s: QuantGemv, rows: int, wide: int) -> str:
    """Outputs from c on, `rows` at a time, as many as there are; all rows of a."""
    m = spec.gemm.m
    tiles = " ".join(_tile(spec, s, range(i, min(i + s.block_m, m)), rows, wide)
                     for i in range(0, m, s.block_m))
    return f"for (; c + {rows} <= count; c += {rows}) {{ const s64 n = p * {spec.gemm.n} + n0 + c; {tiles} }}"


def _tile(spec: QuantGemmSpec, s: QuantGemv, tile: range, rows: int, wide: int) -> str:
    k, m = spec.gemm.k, spec.gemm.m
    run, names = decode.run_of(spec.type, k, s.isa.lanes), [(i, r) for r in range(rows) for i in tile]
    shared = run > 1

    def step(count: str = "") -> str:
        out = [f"const vf x{i} = load_f32(wide + {i * wide} + k);" for i in tile]
        for r in range(rows):
            if count: out.append(f"const vf w{r} = weights_n_(w, n + {r}, k, {count});")
            elif shared: out.append(f"const vf w{r} = weight_(value_(w, n + {r}, k), f{r});")
            else: out.append(f"const vf w{r} = weights_(w, n + {r}, k);")
            out += [f"s{i}_{r} = fma_(x{i}, w{r}, s{i}_{r});" for i in tile]
        return " ".join(out)
    made = [f"vf s{i}_{r} = (vf)0.f;" for i, r in names]
    lanes = s.isa.lanes
    whole = k // lanes * lanes
    if shared and run < whole:
        fetched = " ".join(f"const factors f{r} = factors_(w, n + {r}, k0);" for r in range(rows))
        many = whole // run * run
        made.append(f"for (s64 k0 = 0; k0 < {many}; k0 += {run}) {{ {fetched} "
                    f"for (s64 k = k0; k < k0 + {run}; k += W) {{ {step()} }} }}")
        if many < whole:
            made.append(f"{{ const s64 k0 = {many}; {fetched} "
                        f"for (s64 k = k0; k < {whole}; k += W) {{ {step()} }} }}")
    else:
        fetched = " ".join(f"const factors f{r} = factors_(w, n + {r}, 0);" for r in range(rows) if shared)
        made.append(f"{{ {fetched} for (s64 k = 0; k < {whole}; k += W) {{ {step()} }} }}")
    if whole < k: made.append(f"{{ const s64 k = {whole}; {step(str(k - whole))} }}")
    made += [f"sums[p * {m} + {i}][c + {r}] = sum_(s{i}_{r});" for i, r in names]
    return f"{{ {' '.join(made)} }}"
