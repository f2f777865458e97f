"""SASS instructions with the bits that control their issue and the PTX lines they come from.

Protocol: `timed(text, module)` reads what nvdisasm prints with `FLAGS` of a cubin that ptxas made with
-lineinfo. The lines are ptxas's own, of the opcodes of the PTX instructions, whatever .loc directives say.
ptxas gives no line to some of what it inserts, and nvdisasm then repeats the one before: where the opcode
shows that it is another's, the line is that of the next PTX instruction that can have been meant, else 0.

An instruction's 128 bits hold, from bit 105 up: 4 of cycles until the warp's next instruction may issue, 1
hint to yield, 3 for the scoreboard that is set until the result is written (7: none), 3 for the one set until
the operands are read, 6 of the scoreboards waited for, 4 of the operands kept for reuse.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from tinygrad_nv.ptx.sass import SECTION, TENSOR, SASSInstruction, functions
from tinygrad_nv.ptx.syntax import PTXModule

FLAGS = ("-gp", "-hex")
MARK = re.compile(r'^\s*//## File "[^"]*", line (\d+)')
LOW = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/.*/\* 0x([0-9a-f]{16}) \*/")
HIGH = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
NONE = 7  # of the scoreboards
# the PTX that some opcodes come from
ORIGINS = {**{each: ("wgmma",) if each.endswith("GMMA") else ("mma", "wmma") for each in TENSOR},
           "SYNCS": ("mbarrier", "cp"), "BAR": ("bar", "barrier"), "UTMALDG": ("cp",), "UTMASTG": ("cp",)}


@dataclass(frozen=True)
class TimedInstruction(SASSInstruction):
    """A SASS instruction. `ptx_line` is 0 without one, `stall` cycles until the next may issue; `wait_mask`
    has a bit for each scoreboard waited for, `reuse` one for each operand kept."""
    ptx_line: int = 0
    stall: int = 0
    yield_hint: bool = False
    write_barrier: int | None = None
    read_barrier: int | None = None
    wait_mask: int = 0
    reuse: int = 0


def timed(text: str, module: PTXModule) -> dict[str, tuple[TimedInstruction, ...]]:
    """The instructions of each kernel of a listing, in the order of addresses."""
    rows = {(name, address): (line, bits) for name, address, line, bits in _rows(text)}
    called = {each.line: each.mnemonic for function in module.callees.values() for each in function.body}
    made = {}
    for name, code in functions(text).items():
        lines = called | {each.line: each.mnemonic for each in module.functions[name].body}
        made[name] = tuple(_own([_timed(each, lines, *rows[name, each.address]) for each in code], lines))
    return made


def _rows(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Function, address, line (0 before the first) and encoding of each instruction."""
    name, line, address, low = "", 0, 0, 0
    for row in text.splitlines():
        if (found := SECTION.match(row)) is not None: name, line = found[1] or found[2], 0
        elif (found := MARK.match(row)) is not None: line = int(found[1])
        elif (found := LOW.match(row)) is not None: address, low = int(found[1], 16), int(found[2], 16)
        elif (found := HIGH.match(row)) is not None: yield name, address, line, int(found[1], 16) << 64 | low


def _timed(each: SASSInstruction, lines: Mapping[int, str], line: int, bits: int) -> TimedInstruction:
    control = bits >> 105
    write, read = control >> 5 & 7, control >> 8 & 7
    return TimedInstruction(*(getattr(each, field.name) for field in fields(each)),
                            line if line in lines else 0, control & 15, bool(control >> 4 & 1),
                            None if write == NONE else write, None if read == NONE else read,
                            control >> 11 & 63, control >> 17 & 15)


def _own(code: Sequence[TimedInstruction], lines: Mapping[int, str]) -> Iterator[TimedInstruction]:
    """The same, without lines of others and behind the end."""
    taken = {each.ptx_line for each in code if lines.get(each.ptx_line) in ORIGINS.get(each.opcode, ())}
    last: dict[tuple[str, ...], int] = {}
    ended = False
    for each in code:
        ended |= each.opcode == "BRA" and each.target == each.address
        line, origins = each.ptx_line, ORIGINS.get(each.opcode)
        if origins and lines.get(line) not in origins:
            line = next((other for other in sorted(lines) if other > last.get(origins, 0)
                         and lines[other] in origins and other not in taken), 0)
        if origins and line: last[origins] = line
        yield replace(each, ptx_line=0 if ended else line)
