"""atom and red. Handlers: csrc/atomics.c."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_memory import destinations, element, items_of, order_flags, places
from tinygrad_nv.ptx.emulator.lowering import SPACES, WIDTHS, Lowering, lowers
from tinygrad_nv.ptx.syntax import Instruction, Sink

# atomics.c; asynchronous reductions use the numbers too
OPERATIONS = {"add": 0, "min": 1, "max": 2, "inc": 3, "dec": 4, "and": 5, "or": 6, "xor": 7, "exch": 8,
              "cas": 9}
TYPES = {"b": 0, "u": 1, "s": 2, "f": 3, "f16": 4, "bf16": 5, "f16x2": 6, "bf16x2": 7}
INTEGERS, HALVES = ("u32", "s32", "u64", "s64"), ("f16", "bf16", "f16x2", "bf16x2")
BITS = ("b32", "b64", "u32", "u64", "s32", "s64")
ALLOWED = {"add": (*INTEGERS, "f32", "f64", *HALVES), "min": (*INTEGERS, *HALVES),
           "max": (*INTEGERS, *HALVES),
           "inc": ("u32",), "dec": ("u32",), "and": BITS, "or": BITS, "xor": BITS,
           "exch": (*BITS, "f32", "f64", "b128"), "cas": (*BITS, "b16", "b128")}


def operation_and_type(low: Lowering) -> tuple[str, str]:
    """What is done to elements of which type; an error when PTX has no such operation."""
    kind, operation = element(low)[0], low.one_of(*OPERATIONS)
    if not operation: raise low.fail("no operation", f"one of {', '.join(OPERATIONS)}")
    if kind not in ALLOWED[operation]:
        raise low.fail(f".{operation} of .{kind}", f"{', '.join(ALLOWED[operation])}")
    return operation, kind


def combine_number(operation: str, kind: str) -> int:
    """Op.more for the handlers: operation | type << 8."""
    return OPERATIONS[operation] | TYPES.get(kind, TYPES.get(kind[0], 0)) << 8


@lowers("atom", "red")
def atomic(low: Lowering, instruction: Instruction) -> None:
    """`atom{.sem}{.scope}{.space}.op{.vec}.type d, [a], b{, c}{, policy};`, and `red` without d."""
    operation, kind = operation_and_type(low)
    space = low.space()
    if space not in (SPACES["generic"], SPACES["global"], SPACES["shared"], SPACES["shared::cluster"]):
        raise low.fail("an atomic in memory of one thread", ".global, .shared::cta or .shared::cluster")
    operands = list(instruction.operands)
    if instruction.mnemonic == "red": operands.insert(0, Sink())
    where = low.address(operands[1])
    values = items_of(low, operands[2])
    old = (Sink(),) * len(values) if isinstance(operands[0], Sink) else items_of(low, operands[0])
    out = destinations(low, old)
    sources = tuple(low.source(value, kind) for value in (*values,
                                                          *operands[3:4 if operation == "cas" else 3]))
    if operation == "cas" and len(sources) != 2:
        raise low.fail("no new value", "atom.cas d, [a], compare, new")
    handler, more = "atom", combine_number(operation, kind)
    if kind == "b128": handler, more = "atom_b128", OPERATIONS[operation]
    low.emit(handler, list=(*out, *sources), space=space, width=WIDTHS[kind], vector=len(values), more=more,
             flags=order_flags(low), reads=(*places(low, where), *sources),
             writes=tuple(place for place in out if place >= 0), **where)
