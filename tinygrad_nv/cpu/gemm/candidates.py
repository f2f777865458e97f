"""Which schedules a product can have on a CPU, and which are near to one.

Protocol: `problems` says of a schedule from anywhere, a file say, why a template could not make a kernel of
it. `starts` are what templates choose by themselves; `around` gives the legal schedules that differ in one
number, halved or doubled and rounded to what the others need, or of a blocked product in the shape that is
kept in registers.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tinygrad_nv.cpu.gemm import amx, templates
from tinygrad_nv.cpu.gemm.blocked import kernel as gemm
from tinygrad_nv.cpu.gemm.blocked.blocks import MOST_BYTES_K, STACK_BYTES, Blocks, kind_of
from tinygrad_nv.cpu.gemm.blocked.pack import PER
from tinygrad_nv.cpu.gemm.gemv import kernel as gemv
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

NUMBERS = ("block_m", "block_n", "block_k", "rows", "columns")
MOST_PARTS, MOST = 4096, 1 << 20
MOST_SUMS = 64               # vectors that a GEMV's innermost loop adds to, each a line of C
MOST_GEMV_BYTES = 256 << 10  # of sums on a stack


def starts(spec: GemmSpec, target: CPU) -> list[CPUSchedule]:
    """The default of each template that takes a product, in order of preference."""
    return [t.default(spec, target) for t in templates.preferred(spec, target)
            if not t.problems(spec, target)]


def problems(s: CPUSchedule, spec: GemmSpec, target: CPU) -> list[str]:
    """Why a schedule cannot be used for a product; empty when it can."""
    if s.template not in _LEGAL: return [f"template {s.template!r}, one of {', '.join(_LEGAL)} is needed"]
    if s.isa != target.isa: return [f"for {s.isa}, here is {target.isa}"]
    out = [] if 1 <= s.parts <= MOST_PARTS else [f"{s.parts} parts, 1 to {MOST_PARTS}"]
    out += [f"{name} {value}" for name in NUMBERS if not 0 <= (value := getattr(s, name)) <= MOST]
    return out or templates.template(s).problems(spec, target) or _LEGAL[s.template](spec, s)


def around(spec: GemmSpec, target: CPU, s: CPUSchedule) -> list[CPUSchedule]:
    """Legal schedules near to one, each once."""
    made = dict.fromkeys(_fitted(spec, one) for one in _changed(target, s))
    return [one for one in made if one != s and not problems(one, spec, target)]


def _changed(target: CPU, s: CPUSchedule) -> Iterator[CPUSchedule]:
    if s.template == gemm.TEMPLATE:
        for vectors in (1, 2, 3, 4):
            most = (s.isa.registers - vectors - 1) // vectors
            yield replace(s, rows=most, columns=vectors * s.isa.lanes)
    for name in ("block_k", "block_m", "block_n", "rows", "parts"):
        value = getattr(s, name)
        if value > 1: yield replace(s, **{name: value // 2})
        if value: yield replace(s, **{name: value * 2})
    yield replace(s, parts=target.threads)


# **** what each template needs ****

def _fitted(spec: GemmSpec, s: CPUSchedule) -> CPUSchedule:
    """Blocks rounded to multiples, and no larger than the product."""
    if s.template == gemv.TEMPLATE:
        most = gemv.few_rows(spec)
        return replace(s, block_m=min(s.block_m, most.m), block_n=up(min(s.block_n, most.n), s.isa.lanes))
    if s.template == amx.TEMPLATE:
        turned = amx.oriented(spec)
        m, n, k = amx.multiples(turned)
    else:
        turned = gemm.oriented(spec, s.isa)
        m, n, k = s.rows, s.columns, s.isa.lanes * PER[kind_of(turned, s.isa)]
    if not min(m, n, k): return s
    return replace(s, block_m=up(min(s.block_m, turned.m), m), block_n=up(min(s.block_n, turned.n), n),
                   block_k=up(min(s.block_k, turned.k), k))


def _gemv(spec: GemmSpec, s: CPUSchedule) -> list[str]:
    spec = gemv.few_rows(spec)
    out = [f"{name} 0" for name in ("rows", "block_m", "block_n") if not getattr(s, name)]
    if s.block_n % s.isa.lanes: out.append(f"block_n {s.block_n}, a multiple of {s.isa.lanes} is needed")
    if (sums := s.rows * min(s.block_m, spec.m) * spec.parts) > MOST_SUMS:
        out.append(f"{sums} sums in registers, at most {MOST_SUMS}")
    if (need := 4 * spec.parts * spec.m * s.block_n) > MOST_GEMV_BYTES:
        out.append(f"{need} bytes of sums on a stack, at most {MOST_GEMV_BYTES}")
    return out


def _gemm(spec: GemmSpec, s: CPUSchedule) -> list[str]:
    spec = gemm.oriented(spec, s.isa)
    kind, lanes = kind_of(spec, s.isa), s.isa.lanes
    needed = (("columns", lanes), ("rows", 1), ("block_m", s.rows), ("block_n", s.columns),
              ("block_k", lanes * PER[kind]))
    out = [f"{name} {value}, a multiple of {of} is needed" for name, of in needed
           if not (value := getattr(s, name)) or (of and value % of)]
    if out: return out
    vectors = s.columns // lanes
    if (used := vectors * (s.rows + 1) + 1) > s.isa.registers:
        out.append(f"{s.rows}x{s.columns} takes {used} registers, {s.isa.registers} there are")
    if spec.a.dtype in INT8S and kind == "fma" and s.block_k > MOST_BYTES_K:
        out.append(f"sums of {s.block_k} products of bytes in float32, at most {MOST_BYTES_K} are exact")
    need = gemm.stack_bytes(spec, s.isa, Blocks(s.block_m, s.block_n, s.block_k, s.rows, s.columns))
    if need > STACK_BYTES: out.append(f"{need} bytes on a stack, at most {STACK_BYTES}")
    return out


_LEGAL: dict[str, Callable[[GemmSpec, CPUSchedule], list[str]]] = {
    gemv.TEMPLATE: _gemv, gemm.TEMPLATE: _gemm, amx.TEMPLATE: amx.legal}
