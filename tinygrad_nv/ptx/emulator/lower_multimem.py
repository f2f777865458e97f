"""multimem. Handlers: csrc/multimem.c."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_atomics import OPERATIONS, combine_number
from tinygrad_nv.ptx.emulator.lower_memory import STRONG, destinations, element, items_of, order_flags, places
from tinygrad_nv.ptx.emulator.lowering import SPACES, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Instruction

F32_SUMS = 32


@lowers("multimem.ld_reduce")
def load_reduce(low: FunctionLowering, instruction: Instruction) -> None:
    """`multimem.ld_reduce{.sem}{.scope}{.global}.op{.acc::f32}{.vec}.type d, [a];`."""
    kind, width = element(low)
    operation = low.one_of(*OPERATIONS)
    out = destinations(low, items_of(low, instruction.operands[0]))
    where = low.address(instruction.operands[1])
    flags = order_flags(low) | (F32_SUMS if low.has("acc::f32") else 0)
    low.emit("multimem_ld_reduce", list=out, space=SPACES["global"], width=width, vector=len(out),
             flags=flags, more=combine_number(operation, kind), reads=places(low, where),
             writes=tuple(place for place in out if place >= 0), **where)


@lowers("multimem.st", "multimem.red")
def write(low: FunctionLowering, instruction: Instruction) -> None:
    """`multimem.st{.sem}{.scope}{.global}{.vec}.type [a], b;` and `multimem.red….op….type [a], b;`."""
    kind, width = element(low)
    stores = low.has("st")
    values = tuple(low.source(item, kind) for item in items_of(low, instruction.operands[1]))
    where = low.address(instruction.operands[0])
    flags = order_flags(low) | (0 if stores else STRONG)    # a reduction is relaxed where it says nothing
    low.emit("multimem_write", list=values, space=SPACES["global"], width=width, vector=len(values),
             flags=flags, more=combine_number("exch" if stores else low.one_of(*OPERATIONS), kind),
             reads=(*places(low, where), *values), **where)
