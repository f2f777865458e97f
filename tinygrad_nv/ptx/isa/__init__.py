"""The instructions that are emitted and emulated: one table, and checks against it.

Protocol: `FORMS` are the rows, `find` the row of an opcode, `key_of` the name of its operation (the emulator
dispatches on it). `check` checks a whole instruction: operands, their number, types and ranges, and whether
an architecture and a .version have it. `example` writes an instance. Lowest versions are those that ptxas
13.0 enforces. An error is a `PTXError` with the instruction's line.

The rows are in arithmetic.py, memory.py and tensor.py; forms.py reads them, operands.py knows operands.
"""
from __future__ import annotations

import difflib
import functools

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.isa.forms import ARCH_VERSIONS, FORMS, Form
from tinygrad_nv.ptx.isa.operands import REGISTERS, OperandSlot, cut, problem, sample
from tinygrad_nv.ptx.syntax import Instruction, Operand

__all__ = ["ARCH_VERSIONS", "FORMS", "REGISTERS", "Form", "check", "check_instruction", "cut", "example",
           "find", "key_of", "operands_of", "slots_of"]

MNEMONICS: dict[str, list[Form]] = {}
for _row in FORMS: MNEMONICS.setdefault(_row.mnemonic, []).append(_row)
KEYS = frozenset(form.key for form in FORMS)


@functools.lru_cache(maxsize=4096)
def _find_form(mnemonic: str, modifiers: tuple[str, ...]) -> Form | None:
    return next((form for form in MNEMONICS.get(mnemonic, ()) if form.match(modifiers) is not None), None)


def find(mnemonic: str, modifiers: tuple[str, ...], line: int = 0) -> Form:
    """The form of an opcode. Raises `PTXError` with the nearest forms where there is none."""
    if (form := _find_form(mnemonic, tuple(modifiers))) is not None: return form
    opcode = ".".join((mnemonic, *modifiers))
    if mnemonic not in MNEMONICS:
        near = difflib.get_close_matches(mnemonic, MNEMONICS, 3)
        raise PTXError(f"line {line}: no instruction {mnemonic}", line,
                       "an instruction of the PTX ISA, such as add.s32 or ld.global.b32",
                       f"perhaps {' or '.join(near)}" if near else "write it with others")
    nearest = sorted(MNEMONICS[mnemonic], key=lambda form: -_likeness(form, modifiers))[:3]
    raise PTXError(f"line {line}: no instruction {opcode}", line,
                   "\n            ".join(dict.fromkeys(form.text for form in nearest)),
                   "correct the modifiers")


def _likeness(form: Form, modifiers: tuple[str, ...]) -> int:
    """Modifiers that a form knows, less those it lacks."""
    known = set(form.words).union(*(group.alternatives for group in form.groups))
    missing = sum(group.required and not set(group.alternatives) & set(modifiers) for group in form.groups)
    missing += 3 * sum(word not in modifiers for word in form.words)
    return 2 * sum(word in known for word in modifiers) - missing


def key_of(mnemonic: str, modifiers: tuple[str, ...]) -> str:
    """The semantics key of an opcode: `cp.async.bulk.tensor`, `setp`, `mbarrier.try_wait`."""
    return find(mnemonic, modifiers).key


def _select_slots(slots: tuple[OperandSlot, ...], modifiers: tuple[str, ...]) -> tuple[OperandSlot, ...]:
    """The slots that an opcode with these modifiers has."""
    return tuple(slot for slot in slots if not slot.when or slot.when in modifiers)


def operands_of(form: Form, modifiers: tuple[str, ...],
                operands: tuple[Operand, ...]) -> tuple[OperandSlot, ...] | str:
    """The slots that operands fill, or what is wrong with them."""
    use, wrongs = form.use(modifiers), []
    for slots in form.operands:
        listed = _select_slots(slots, modifiers)
        needed = sum(not slot.optional for slot in listed)
        if not needed <= len(operands) <= len(listed):
            count = f"{needed}" if needed == len(listed) else f"{needed} to {len(listed)}"
            wrongs.append((99, f"{len(operands)} operands, {count} are expected"))
            continue
        spare = len(listed) - len(operands)
        optional = [slot for slot in listed if slot.optional]
        listed = tuple(slot for slot in listed if slot not in optional[len(optional) - spare:])
        faults = [(i, wrong) for i, (slot, operand) in enumerate(zip(listed, operands, strict=True))
                  if (wrong := problem(slot, operand, use))]
        if not faults: return listed
        wrongs.append((len(faults), f"operand {faults[0][0] + 1}: {faults[0][1]}"))
    return min(wrongs, key=lambda wrong: wrong[0])[1]


def check(instruction: Instruction, arch: str, version: tuple[int, int]) -> Form:
    """The form of an instruction that an architecture and a .version have. Raises `PTXError` where an
    operand, the architecture or the version is wrong."""
    return check_instruction(instruction, arch, version)[0]


def check_instruction(instruction: Instruction, arch: str,
            version: tuple[int, int]) -> tuple[Form, tuple[OperandSlot, ...]]:
    """Checks an instruction like `check`; returns the form and the slots that its operands fill."""
    line, opcode = instruction.line, instruction.opcode
    form = find(instruction.mnemonic, instruction.modifiers, line)
    if arch not in ARCH_VERSIONS:
        raise PTXError(f"line {line}: unknown architecture {arch}", line, ", ".join(ARCH_VERSIONS),
                       "change .target")
    guard = instruction.guard
    if guard is not None and guard.kind != "pred":
        raise PTXError(f"line {line}: guard {guard.name} is .{guard.kind}", line, "a predicate",
                       "compare with setp")
    filled = operands_of(form, instruction.modifiers, instruction.operands)
    if isinstance(filled, str):
        raise PTXError(f"line {line}: {opcode}: {filled}", line, form_text(form), "correct the operand")
    _check_target(form, instruction, filled, arch, version)
    return form, filled


def _check_target(form: Form, instruction: Instruction, slots: tuple[OperandSlot, ...], arch: str,
              version: tuple[int, int]) -> None:
    """Raises `PTXError` where the architecture or the version does not have it."""
    line, opcode = instruction.line, instruction.opcode
    lowest = form.lowest(instruction.modifiers, arch, slots)
    if lowest is None:
        needs = form.target(instruction.modifiers, slots)
        raise PTXError(f"line {line}: {opcode} needs {needs}, the target is {arch}", line,
                       f"a target from {needs} on", f"write it for {needs}, or use what {arch} has")
    if version < lowest:
        raise PTXError(f"line {line}: {opcode} needs .version {lowest[0]}.{lowest[1]} on {arch}, the text "
                       f"has {version[0]}.{version[1]}", line, f".version {lowest[0]}.{lowest[1]} or later",
                       "raise .version")


def form_text(form: Form) -> str:
    """A form as its row has it: pattern and operands."""
    lists = " or ".join(", ".join(slot.text for slot in slots) for slots in form.operands)
    return f"{form.text.replace(' ', '')} {lists}".rstrip()


def slots_of(form: Form, modifiers: tuple[str, ...], operands: int = 0,
             optional: bool = True) -> tuple[OperandSlot, ...]:
    """The slots of one of a form's operand lists under given modifiers."""
    slots = _select_slots(form.operands[operands], modifiers)
    return tuple(slot for slot in slots if optional or not slot.optional)


def example(form: Form, modifiers: tuple[str, ...] | None = None, operands: int = 0,
            optional: bool = True) -> str:
    """An instance of a row, in the registers of `REGISTERS`: with given modifiers, with the operands of one
    of its lists, with or without the optional ones."""
    chosen = next(iter(form.opcodes())) if modifiers is None else modifiers
    use = form.use(chosen)
    slots = slots_of(form, chosen, operands, optional)
    listed = ", ".join(sample(slot, use, i) for i, slot in enumerate(slots))
    return ".".join((form.mnemonic, *chosen)) + (f" {listed};" if listed else ";")

