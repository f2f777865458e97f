"""Branches, exits, and instructions without an effect here."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lowering import FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Instruction, Operand, Register, Symbol


@lowers("bra")
def branch(low: FunctionLowering, instruction: Instruction) -> None:
    """`bra{.uni} label;`."""
    (label,) = instruction.operands
    if not isinstance(label, Symbol): raise low.fail("a label is expected")
    low.emit("bra", target=label.name)


@lowers("brx.idx")
def lower_brx_idx(low: FunctionLowering, instruction: Instruction) -> None:
    """`brx.idx{.uni} index, table;` with the table of a .branchtargets directive."""
    index, table = instruction.operands
    if not (isinstance(index, Register) and isinstance(table, Symbol) and table.name in low.function.tables):
        raise low.fail("an index register and the label of a .branchtargets table are expected")
    low.emit("brx", a=low.source(index, "u32"), labels=low.function.tables[table.name])


@lowers("exit", "ret")
def leave(low: FunctionLowering, instruction: Instruction) -> None:
    """The thread is done."""
    low.emit("exit")


@lowers("trap")
def trap(low: FunctionLowering, instruction: Instruction) -> None:
    """Ends the launch."""
    low.emit("trap")


@lowers("call")
def system_call(low: FunctionLowering, instruction: Instruction) -> None:
    """`call __assertfail, (message, file, line, function, size);`, which ends the launch, and `call (result),
    vprintf, (format, arguments);`. Other calls are expanded before (calls.py)."""
    results, name, arguments = ((None, *instruction.operands)[-3:])
    assert isinstance(name, Symbol)
    wanted = 2 if name.name == "vprintf" else 5
    places = [local_place(low, x, 4 if wanted == 5 and number == 2 else 8)
              for number, x in enumerate(getattr(arguments, "items", ()))]
    if len(places) != wanted: raise low.fail(f"{len(places)} parameters", f"the {wanted} of {name.name}")
    result = [local_place(low, x, 4) for x in getattr(results, "items", ())] or [-1]
    if wanted == 2: low.emit("vprintf", list=(*result, *places))
    else: low.emit("assertfail", list=tuple(places))


def local_place(low: FunctionLowering, operand: Operand, nbytes: int) -> int:
    """Returns where a parameter of a call is in a thread's local memory: a variable of at least so many
    bytes."""
    if not isinstance(operand, Symbol) or operand.name not in low.local:
        raise low.fail("an argument that is no .param variable of the function")
    if not 0 <= operand.offset <= low.variables[operand.name].nbytes - nbytes:
        raise low.fail(f"{nbytes} bytes at offset {operand.offset} of {operand.name}",
                       f"a place in its {low.variables[operand.name].nbytes} bytes")
    return low.local[operand.name] + operand.offset


@lowers("brkpt", "pmevent", "nop")
def nothing(low: FunctionLowering, instruction: Instruction) -> None:
    """For debuggers."""
    low.emit("nop")
