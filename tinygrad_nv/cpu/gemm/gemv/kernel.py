"""Products of few rows with a matrix that is read once: GEMV, and skinny GEMM.

Protocol: the time is that of reading b, so each element of b is loaded once, widened to float32 (int32 of
bytes) and used for all rows of a, which lie in a cache, widened. What is shared out is the columns of all
products of the batch, in chunks of `block_n`:

    for each chunk of a part
      widen a, where the chunk is of another product than the one before
      sums[i][c] = Σ_k a[i, k] b[c, k]        main_loop.py, by how b lies
      out[i][c] = epilogue(sums[i][c])        vectors of neighbouring columns, whatever way the sums were made

A sum has one order, given by the spec and the instruction set: no bit depends on chunks or parts. Few columns
and many rows are the same product transposed.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.gemm.gemv.main_loop import GemvOperands, apart, at, sums_of_columns, sums_of_rows
from tinygrad_nv.cpu.gemm.gemv.pairs import (
    ROW_BLOCK,
    ROWS,
    functions,
    most_rows,
    reads_in_place,
    sums_of_pairs,
    takes_pairs,
)
from tinygrad_nv.cpu.gemm.layout import MOST_ROWS, few_rows
from tinygrad_nv.cpu.gemm.schedules import CPUGemv
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import GemmSpec

MOST_SUMS = 64                # vectors that the innermost loop adds to, each a line of C
MOST_SUMS_BYTES = 256 << 10   # of sums on a stack
STACK_BYTES = 3 << 18         # of a in float32 on a thread's stack
SUMS_BYTES = 16 << 10         # half of the smallest L1 cache
PARTS = 4                     # for each thread, so that one that is held up does less
BYTES_OF_ROW = 4 << 10        # shorter pieces of b's rows, where they are side by side, come more slowly
BYTES_OF_PART = 64 << 10      # waking a thread takes as long as reading so much of b


def problems(spec: GemmSpec, s: CPUGemv) -> list[str]:
    """Why a product cannot have a schedule; empty when it can."""
    return _find_problems(spec := few_rows(spec), s.isa) or _wrong(spec, s)


def _find_problems(spec: GemmSpec, isa: ISA) -> list[str]:
    """Returns what is in the way of a product, whatever the schedule."""
    out = expression.problems(spec.epilogue)
    if spec.m > (most := _most_rows(spec, isa)): out.append(f"{spec.m} rows, at most {most}")
    elif _wide_bytes(spec, isa) > STACK_BYTES and (spec.symbolic or spec.a.k != 1):
        what, need = "symbolic" if spec.symbolic else f"at strides of {spec.a.k}", _wide_bytes(spec, isa)
        out.append(f"{spec.m} rows of {spec.k}, {what}, have {need} bytes in float32, at most {STACK_BYTES} "
                   "on a stack")
    return out


def _wrong(spec: GemmSpec, s: CPUGemv) -> list[str]:
    out = [f"{name} 0" for name in ("rows", "block_m", "block_n") if not getattr(s, name)]
    if _sums_pairs(spec, s.isa):
        out += [f"{name} {value}, {ROWS} are needed" for name in ("rows", "block_m")
                if (value := getattr(s, name)) != ROWS]
        if s.block_k % (2 * s.isa.lanes):
            out.append(f"block_k {s.block_k}, a multiple of {2 * s.isa.lanes} is needed")
    if s.block_n > s.isa.lanes and s.block_n % s.isa.lanes:
        out.append(f"block_n {s.block_n}, a multiple of {s.isa.lanes} is needed")
    if (sums := s.rows * min(s.block_m, spec.m) * spec.parts) > MOST_SUMS:
        out.append(f"{sums} sums in registers, at most {MOST_SUMS}")
    if (need := 4 * spec.parts * spec.m * s.block_n) > MOST_SUMS_BYTES:
        out.append(f"{need} bytes of sums on a stack, at most {MOST_SUMS_BYTES}")
    return out


def default(spec: GemmSpec, target: CPU) -> CPUGemv:
    """The default schedule, where none was tuned."""
    spec, lanes = few_rows(spec), target.isa.lanes
    if _sums_pairs(spec, target.isa): made = _of_pairs(spec, target)
    else: made = _of_columns(spec, target.isa) if _by_columns(spec) else _of_rows(spec, target.isa)
    nbytes = spec.matrices * spec.n * spec.parts * spec.k * spec.b.dtype.itemsize
    most = target.threads * PARTS if target.threads > 1 else 1
    if _by_columns(spec) and spec.matrices == 1:
        most = min(most, max(target.threads, spec.n * spec.b.dtype.itemsize // BYTES_OF_ROW))
    parts = max(1, min(most, nbytes // BYTES_OF_PART))
    # so many chunks that parts have the same number of them
    chunks = -(-spec.n // made.block_n)
    if spec.matrices % parts: chunks = -(-chunks // parts) * parts
    block_n = -(-spec.n // chunks)
    if block_n > lanes: block_n = -(-block_n // lanes) * lanes
    return replace(made, parts=min(parts, spec.matrices * -(-spec.n // block_n)), block_n=block_n)


def _of_rows(spec: GemmSpec, isa: ISA) -> CPUGemv:
    o, block_k, most = _operands(spec, isa), 0, SUMS_BYTES
    if spec.b.k == 1 and isa.lanes > 4 and spec.b.dtype == dtypes.float32:
        # lanes of four columns are added at once; loads of b are repeated, which is hidden behind 24 sums
        rows = max(1, 4 // spec.parts)
        tallest = max(1, isa.registers * 3 // 4 // (rows * spec.parts))
        block_m = -(-spec.m // -(-spec.m // tallest))
        if spec.m > block_m: most *= 2  # tiles take turns, each with its own rows
    else:
        block_m = min(spec.m, isa.registers // 4)
        held = isa.registers * (3 if o.pairs else 2) // 4  # vectors of sums; with more the compiler spills
        rows = max(1, min(4 // spec.parts, held // (block_m * spec.parts)))
    # two rows of a may come from the second cache: b comes more slowly
    if spec.b.k == 1 and spec.m > 2 and spec.m * o.row_bytes > most:
        block_k = max(64, most * spec.k // (spec.m * o.row_bytes) // 64 * 64)
    return CPUGemv(isa, 1, block_m, 256, block_k, rows)


def _of_pairs(spec: GemmSpec, target: CPU) -> CPUGemv:
    # rows of a take half of the first cache
    deepest = max(64, target.l1_bytes // 2 // (ROW_BLOCK * spec.a.dtype.itemsize) // 64 * 64)
    block_k = up(-(-spec.k // -(-spec.k // deepest)), 64)
    return CPUGemv(target.isa, 1, ROWS, 256 if spec.m <= ROW_BLOCK else 128, block_k, ROWS)


def _of_columns(spec: GemmSpec, isa: ISA) -> CPUGemv:
    rows = spec.m * spec.parts
    if rows <= 2: return CPUGemv(isa, 1, spec.m, max(64, SUMS_BYTES // (4 * rows)), rows=4)
    block_m = min(spec.m, isa.registers // 2)
    return CPUGemv(isa, 1, block_m, 1024, 64 // spec.b.dtype.itemsize, 1,
                   max(1, isa.registers // 2 // block_m) * isa.lanes)


def build(spec: GemmSpec, schedule: CPUGemv) -> CPUKernel:
    """The kernel of a product."""
    given, isa = spec, schedule.isa
    spec = few_rows(given)
    operands = _operands(spec, isa)
    by_columns = _by_columns(spec)
    by_pairs = _sums_pairs(spec, isa)
    loop = sums_of_pairs if by_pairs else sums_of_columns if by_columns else sums_of_rows
    before = header("gemm.h") + functions(operands, schedule) if by_pairs else ""
    sums = loop(operands, schedule)
    chunks = -(-spec.n // schedule.block_n)
    items, kind = spec.matrices * chunks, "s32" if operands.integers else "float"
    indices = [f"const s64 b{i} = matrix / {prod(spec.batch[i + 1:])} % {extent};"
               for i, extent in enumerate(spec.batch)]
    body = f"""
  {operands.declare_arrays()}
  {kind} sums[{spec.parts * spec.m}][{up(schedule.block_n, isa.lanes)}] __attribute__((aligned(64)));
  const s64 end = (s64)(core_id + 1) * {items} / {schedule.parts};
  for (s64 item = (s64)core_id * {items} / {schedule.parts}, before = -1; item < end; item++) {{
    const s64 matrix = item / {chunks}, n0 = item % {chunks} * {schedule.block_n};
    const s64 count = {spec.n} - n0 < {schedule.block_n} ? {spec.n} - n0 : {schedule.block_n};
    {' '.join(indices)}
    if (matrix != before) {{ {operands.widen_rows()} before = matrix; }}
    {sums}
    {epilogue(spec)}
  }}"""
    a, b = ("a", "b") if spec is given else ("b", "a")
    inputs = [(c_type(given.a.dtype), a), (c_type(given.b.dtype), b)]
    inputs += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    return kernel(f"gemv_{spec.m}x{spec.n}x{spec.k}", isa, body, [(c_type(spec.out.dtype), "out")], inputs,
                  ["m"] if spec.symbolic else [], schedule.parts, before=before)


def _by_columns(spec: GemmSpec) -> bool: return spec.b.major == "MN" and spec.n > 1


def _operands(spec: GemmSpec, isa: ISA) -> GemvOperands:
    pairs = _are_pairs(spec, isa)
    fits = spec.a.dtype == dtypes.float32 or pairs
    ready = spec.m == 1 and spec.a.k == 1 and fits and not spec.symbolic
    ready |= takes_pairs(spec, pairs) and reads_in_place(spec)
    return GemvOperands(spec, isa, ready or _wide_bytes(spec, isa) > STACK_BYTES, pairs)


def _are_pairs(spec: GemmSpec, isa: ISA) -> bool:
    return isa.bf16 and not isa.emulated and spec.b.dtype == dtypes.bfloat16 and spec.b.k == 1 and \
        not _by_columns(spec)


def _sums_pairs(spec: GemmSpec, isa: ISA) -> bool: return takes_pairs(spec, _are_pairs(spec, isa))


def _most_rows(spec: GemmSpec, isa: ISA) -> int:
    by_pairs = isa.level != "amx" and not spec.symbolic and _sums_pairs(spec, isa)
    return most_rows(spec) if by_pairs else MOST_ROWS


def _wide_bytes(spec: GemmSpec, isa: ISA) -> int: return 4 * spec.m * (up(spec.k, isa.lanes) + 32)


def epilogue(spec: GemmSpec) -> str:
    """C of the epilogue of all rows of a chunk."""
    kind, load = short(spec.out.dtype), f"load_{short(spec.accumulate)}"
    names = [f"z{p}" for p in range(spec.parts)]
    vector = "vi" if spec.accumulate == dtypes.int32 else "vf"
    lines = [f"const {vector} {name} = {load}(sums[{p * spec.m} + i] + c);" for p, name in enumerate(names)]
    place = LanePlace(names, "i", "(n0 + c)", [f"b{i}" for i in range(len(spec.batch))], "left")
    made, value = statements(spec.epilogue, place)
    to = f"out + {at(spec.out.offset, ('i', spec.out.m), ('(n0 + c)', spec.out.n), *apart(spec.out.batch))}"
    store = f"store_n_{kind}({to}, {value}, left);" if spec.out.n == 1 else \
        f"scatter_{kind}({to}, {spec.out.n}, {value}, left);"
    rows = "m" if spec.symbolic else spec.m
    return f"""for (s64 i = 0; i < {rows}; i++) for (s64 c = 0; c < count; c += W) {{
      const s64 left = count - c;
      {' '.join([*lines, *made])} {store}
    }}"""
