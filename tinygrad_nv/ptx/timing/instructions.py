"""SASS instructions with the bits that control their issue and the PTX lines they come from.

Protocol: `timed(text, module)` reads what nvdisasm prints with `FLAGS` of a cubin that ptxas made with
-lineinfo. The lines are ptxas's own, of the opcodes of the PTX instructions, whatever .loc directives say.
ptxas gives no line to some of what it copies or inserts, and nvdisasm then repeats the one before. Where the
opcode shows that it is another's, the line is that of the nearest PTX instruction without SASS; that of an
mbarrier's first try is that of its loop. What has none is 0.

An instruction's 128 bits hold, from bit 105 up: 4 of cycles until the warp's next instruction may issue, 1
hint to yield, 3 for the scoreboard that is set until the result is written (7: none), 3 for the one set until
the operands are read, 6 of the scoreboards waited for, 4 of the operands kept for reuse.
"""
from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from tinygrad_nv.ptx.sass import SECTION, TENSOR, SASSInstruction, blocks, functions
from tinygrad_nv.ptx.syntax import PTXModule

FLAGS = ("-gp", "-hex")
MARK = re.compile(r'^\s*//## File "[^"]*", line (\d+)')
LOW = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/.*/\* 0x([0-9a-f]{16}) \*/")
HIGH = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
AROUND = 6  # instructions on each side that show which PTX an instruction without a line is among
NONE = 7  # of the scoreboards
# what the PTX of some opcodes begins with
ORIGINS = {**{each: ("wgmma.mma",) if each.endswith("GMMA") else ("mma.", "wmma.mma") for each in TENSOR},
           "SYNCS": ("mbarrier.", "cp.async.mbarrier"), "BAR": ("bar.", "barrier."),
           "UTMALDG": ("cp.async.bulk",), "UTMASTG": ("cp.async.bulk",)}


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


def read_listing(text: str, module: PTXModule) -> dict[str, tuple[TimedInstruction, ...]]:
    """Returns the instructions of each kernel of a listing, in the order of addresses."""
    begins = {0: 0}  # lines by the lines of the PTX instructions that they are in
    for function in (*module.functions.values(), *module.callees.values()):
        begins |= {function.line: 0} | {each.line: each.line for each in function.body}
    order = sorted(begins)
    rows = {(name, address): (begins[order[bisect_right(order, line) - 1]], bits)
            for name, address, line, bits in _rows(text)}
    called = {each.line: each.opcode for function in module.callees.values() for each in function.body}
    made = {}
    for name, code in functions(text).items():
        if name not in module.functions: continue
        lines = called | {each.line: each.opcode for each in module.functions[name].body}
        made[name] = tuple(_own([_decode(each, *rows[name, each.address]) for each in code], lines))
    return made


def _rows(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Function, address, line (0 before the first) and encoding of each instruction."""
    name, line, address, low = "", 0, 0, 0
    for row in text.splitlines():
        if (found := SECTION.match(row)) is not None: name, line = found[1] or found[2], 0
        elif (found := MARK.match(row)) is not None: line = int(found[1])
        elif (found := LOW.match(row)) is not None: address, low = int(found[1], 16), int(found[2], 16)
        elif (found := HIGH.match(row)) is not None: yield name, address, line, int(found[1], 16) << 64 | low


def _decode(each: SASSInstruction, line: int, bits: int) -> TimedInstruction:
    control = bits >> 105
    write, read = control >> 5 & 7, control >> 8 & 7
    return TimedInstruction(
        **vars(each), ptx_line=line, stall=control & 15, yield_hint=bool(control >> 4 & 1),
        write_barrier=None if write == NONE else write, read_barrier=None if read == NONE else read,
        wait_mask=control >> 11 & 63, reuse=control >> 17 & 15)


def _own(code: Sequence[TimedInstruction], lines: Mapping[int, str]) -> Iterator[TimedInstruction]:
    """The same, without lines of others and behind the end."""
    free = {opcode: {i for i, text in lines.items() if text.startswith(origins)} -
            {each.ptx_line for each in code if each.opcode == opcode} for opcode, origins in ORIGINS.items()}
    ended = False
    for block in blocks(code)[0]:
        found: dict[str, list[int]] = defaultdict(list)
        for at, each in enumerate(block):
            if not _strange(each, lines) or ".PHASECHK" in each.modifiers or not free[each.opcode]: continue
            around = [other.ptx_line for other in block[max(at - AROUND, 0):at + AROUND]
                      if not _strange(other, lines)]
            near = median_low(around or [each.ptx_line])
            _, line = min((abs(line - near), line) for line in free[each.opcode])
            found[each.opcode].append(line)
            free[each.opcode].remove(line)
        for opcode in found: found[opcode].sort(reverse=True)
        for each in block:
            ended |= each.opcode == "BRA" and each.target == each.address
            line = each.ptx_line
            if _strange(each, lines):
                own = found[each.opcode]
                line = _retry_line(block,
                                   code) if ".PHASECHK" in each.modifiers else own.pop() if own else 0
            yield replace(each, ptx_line=0 if ended else line)


def _strange(each: TimedInstruction, lines: Mapping[int, str]) -> bool:
    """Whether a line cannot be the instruction's."""
    origins = ORIGINS.get(each.opcode)
    return origins is not None and not lines.get(each.ptx_line, "").startswith(origins)


def _retry_line(block: Sequence[TimedInstruction], code: Sequence[TimedInstruction]) -> int:
    """The line of a first try, which ptxas makes of a loop: that of the try where its branch goes."""
    to = block[-1].target
    return next((each.ptx_line for each in code if each.opcode == "SYNCS" and to is not None
                 and each.address >= to), 0)
