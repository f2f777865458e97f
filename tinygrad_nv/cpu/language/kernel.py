"""A program of the tile language as a kernel of the CPU.

Protocol: the C function `body` computes one program of the grid; the kernel calls it for its part of them.
Parameters are the program's tensors in their order.
"""
from __future__ import annotations

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, header, kernel
from tinygrad_nv.cpu.language.emitter import c_name
from tinygrad_nv.cpu.language.statements import Statements
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.language.ir import Program

STACK_BYTES = 4 << 20    # what a program may keep on a thread's stack, of 8 MB
PARTS = 4                # for each thread, so that one that is held up does less


def build(program: Program, isa: ISA, threads: int) -> CPUKernel:
    """The kernel. Raises `ScheduleError` for a program whose tiles do not fit on a stack."""
    emitter = Statements(program, isa)
    text = emitter.run()
    if emitter.stack_bytes > STACK_BYTES:
        raise ScheduleError(f"the tiles of {program.name} take {emitter.stack_bytes} bytes",
                            f"at most {STACK_BYTES}, on a thread's stack",
                            "smaller blocks: kernel.schedule(block=…)")
    x, y, z = program.grid
    total = x * y * z
    parts = max(1, min(total, threads * PARTS)) if threads > 1 else 1
    pointers = [f"{'' if each.output else 'const '}{c_type(each.dtype)} *p_{c_name(each.name)}"
                for each in program.tensors]
    given = [f"p_{c_name(each.name)}" for each in program.tensors]
    parameters = ", ".join([*pointers, "int pid0", "int pid1", "int pid2"])
    before = [header("gemm.h"), header("language/language.h"), *emitter.functions,
              f"NOINLINE void body({parameters}) {{\n{text}\n}}"]
    loop = (f"  for (s64 t = {total}ll * core_id / {parts}; t < {total}ll * (core_id + 1) / {parts}; t++)\n"
            f"    body({', '.join([*given, f't % {x}', f't / {x} % {y}', f't / {x * y}'])});")
    outputs = [(c_type(each.dtype), f"p_{c_name(each.name)}") for each in program.tensors if each.output]
    inputs = [(c_type(each.dtype), f"p_{c_name(each.name)}") for each in program.tensors if not each.output]
    return kernel(f"tile_{program.name}", isa, loop, outputs, inputs, parts=parts, before="\n".join(before))
