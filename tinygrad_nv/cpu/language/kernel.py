"""A program as a kernel for a CPU: what cannot be, and the text.

Protocol: `problems(program, isa)` says in words why there is no kernel; `build` makes it. `PASSES` are what
they run. The C function `body` computes one program of the grid; the kernel calls it for its part of them.
Parameters are the program's tensors in their order.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.language.emitter import COUNT, c_name
from tinygrad_nv.cpu.language.grouping import Groups, group_stores
from tinygrad_nv.cpu.language.show import show_kernel, show_places, show_stores
from tinygrad_nv.cpu.language.statements import Statements
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.passes import Pass, keep_results, run_passes
from tinygrad_nv.tile.language.ranges import Ranges

PLACES = ("int pid0", "int pid1", "int pid2")
STACK_BYTES = 4 << 20    # what a program may keep on a thread's stack, of 8 MB
PARTS = 4                # for each thread, so that one that is held up does less


@dataclass(eq=False)
class Body:
    """A program on its way to the C of one program of its grid."""
    program: Program
    isa: ISA
    ranges: Ranges = field(init=False)
    grouped: Groups = field(init=False)
    emitter: Statements = field(init=False)
    text: str = field(init=False)


def _group_stores(state: Body) -> None:
    state.ranges = Ranges(state.program)
    state.grouped = group_stores(state.program, state.ranges)


def _write_body(state: Body) -> None:
    state.emitter = Statements(state.program, state.isa, state.ranges, state.grouped)
    state.text = state.emitter.run()


BODY = (
    Pass("stores", "Stores of blocks of one shape become one loop.", _group_stores,
         lambda state: show_stores(state.program, state.grouped)),
    Pass("places", "Operations are written one by one; each value is a variable, an array, or computed where "
         "it is used.", _write_body, lambda state: show_places(state.program, state.emitter.places)))


@keep_results(64)
def _emit(program: Program, isa: ISA) -> tuple[str, tuple[str, ...], int]:
    """The body of a program, the functions that it calls, and its bytes on a thread's stack."""
    state = Body(program, isa)
    run_passes(BODY, state)
    return state.text, tuple(state.emitter.functions), state.emitter.stack_bytes


def problems(program: Program, isa: ISA) -> list[str]:
    """Why a program cannot be a kernel, in words; empty when it can."""
    nbytes = _emit(program, isa)[2]
    return [f"tiles of {nbytes} bytes, at most {STACK_BYTES} on a thread's stack"] * (nbytes > STACK_BYTES)


@dataclass(eq=False)
class Loop:
    """A body on its way to a kernel, called in `parts`."""
    program: Program
    isa: ISA
    threads: int
    parts: int
    by_columns: bool
    kernel: CPUKernel = field(init=False)


def build(program: Program, isa: ISA, threads: int = 1, parts: int = 0,
          by_columns: bool = False) -> CPUKernel:
    """The kernel, called in `parts`; 0: as many as so many threads can share. Programs that follow each other
    are neighbours along x, or along y with `by_columns`. Raises `ScheduleError` for a program whose tiles do
    not fit on a stack."""
    state = Loop(program, isa, threads, parts, by_columns)
    run_passes(KERNEL, state)
    return state.kernel


def _write_kernel(state: Loop) -> None:
    program, isa, threads, parts = state.program, state.isa, state.threads, state.parts
    text, functions, nbytes = _emit(program, isa)
    if nbytes > STACK_BYTES:
        raise ScheduleError(f"the tiles of {program.name} take {nbytes} bytes",
                            f"at most {STACK_BYTES}, on a thread's stack",
                            "smaller blocks: kernel.schedule(block=…)")
    _, y, z = program.grid
    x: int | str = f"(({COUNT} + {program.rows - 1}) / {program.rows})" if program.rows else program.grid[0]
    total = math.prod(program.grid)
    places = (f"t / {y} % {x}", f"t % {y}") if state.by_columns else (f"t % {x}", f"t / {x} % {y}")
    parts = parts or (max(1, min(total, threads * PARTS)) if threads > 1 else 1)
    pointers = [f"{'' if each.output else 'const '}{c_type(each.dtype)} *p_{c_name(each.name)}"
                for each in (*program.tensors, *program.views)]
    given = [f"p_{c_name(each.of or each.name)}" + f" + {each.offset}" * bool(each.offset)
             for each in (*program.tensors, *program.views)]
    integers = [COUNT] * bool(program.rows)
    parameters = ", ".join([*pointers, *(f"int {each}" for each in integers), *PLACES])
    before = [header("gemm.h"), header("language/language.h"), *functions,
              f"NOINLINE void body({parameters}) {{\n{text}\n}}"]
    loop = (f"  const s64 total = (s64){x} * {y * z};\n"
            f"  for (s64 t = total * core_id / {parts}; t < total * (core_id + 1) / {parts}; t++)\n"
            f"    body({', '.join([*given, *integers, *places, f't / ((s64){x} * {y})'])});")
    outputs = [(c_type(each.dtype), f"p_{c_name(each.name)}") for each in program.tensors if each.output]
    inputs = [(c_type(each.dtype), f"p_{c_name(each.name)}") for each in program.tensors if not each.output]
    state.kernel = kernel(f"tile_{program.name}", isa, loop, outputs, inputs, integers, parts,
                          before="\n".join(before))


KERNEL = (Pass("c", "A loop over a part of the grid calls the body.", _write_kernel,
               lambda state: show_kernel(state.kernel.text)),)
PASSES = (*BODY, *KERNEL)
