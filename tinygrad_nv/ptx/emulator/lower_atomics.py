"""atom and red (handlers: csrc/atomics.c), and multimem (csrc/multimem.c)."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_memory import STRONG, destinations, element, items_of, order_flags, places
from tinygrad_nv.ptx.emulator.lowering import SPACES, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Instruction, Sink

# atomics.c
OPERATIONS = {"add": 0, "min": 1, "max": 2, "inc": 3, "dec": 4, "and": 5, "or": 6, "xor": 7, "exch": 8,
              "cas": 9}
TYPES = {"b": 0, "u": 1, "s": 2, "f": 3, "f16": 4, "bf16": 5, "f16x2": 6, "bf16x2": 7}
F32_SUMS = 32


def combine_number(operation: str, kind: str) -> int:
    """Op.more for the handlers: operation | type << 8."""
    return OPERATIONS[operation] | TYPES.get(kind, TYPES.get(kind[0], 0)) << 8


@lowers("atom", "red")
def atomic(low: FunctionLowering, instruction: Instruction) -> None:
    """`atom{.sem}{.scope}{.space}.op{.vec}.type d, [a], b{, c}{, policy};`, and `red` without d."""
    operation, (kind, width), space = low.one_of(*OPERATIONS), element(low), low.space()
    operands = list(instruction.operands)
    if instruction.mnemonic == "red": operands.insert(0, Sink())
    where = low.address(operands[1])
    values = items_of(low, operands[2])
    old = (Sink(),) * len(values) if isinstance(operands[0], Sink) else items_of(low, operands[0])
    out = destinations(low, old)
    if operation == "cas": values = (*values, *operands[3:4])
    sources = tuple(low.source(value, kind) for value in values)
    if operation == "cas" and len(sources) != 2:
        raise low.fail("no new value", "atom.cas d, [a], compare, new")
    handler, more = "atom", combine_number(operation, kind)
    if kind == "b128": handler, more = "atom_b128", OPERATIONS[operation]
    low.emit(handler, list=(*out, *sources), space=space, width=width, vector=len(out), more=more,
             flags=order_flags(low), reads=(*places(low, where), *sources),
             writes=tuple(place for place in out if place >= 0), **where)


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
