"""SASS as the disassembler prints it: functions, their loops, and the instructions of a main loop.

Protocol: `disassemble(cubin)` gives nvdisasm's (or cuobjdump's) text, `functions` its instructions by
function, `blocks` the basic blocks of one, `loops` its natural loops: for a branch back to an instruction
that all ways to the branch pass, everything that reaches the branch without passing it again, wherever it
lies in memory (a wait that spins is often placed after the end). `main_loop` is the innermost loop with
tensor-core instructions that does the most work.

Work is counted in units of what a warp does of a warpgroup's 64 × 8 × 16, 4096 operations: one HMMA.16816,
or 1/32 of an HGMMA.64x256x16.
"""
from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from tinygrad_nv.errors import ToolchainError
from tinygrad_nv.ptx.assemble import find_program

UNIT = 4096  # multiplications and additions: a warp's quarter of 64 × 8 × 16
TENSOR = ("HMMA", "IMMA", "QMMA", "BMMA", "DMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA")
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?PT?\d*)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)"
                  r"\s*(.*?)\s*;")
LABEL = re.compile(r"^\s*([.\w$]+):")
SECTION = re.compile(r"^\s*(?:\.section\s+\.text\.([\w$.]+)|Function : ([\w$.]+))")
AIM = re.compile(r"`\(([.\w$]+)\)|\b0x([0-9a-f]+)\b")
SHAPE = re.compile(r"\.(?:(64)x(\d+)x(\d+)|(16)(8)(\d+)|(8)(8)(\d+))(?:\.|$)")
WAYS_OUT = ("EXIT", "RET", "BRX", "JMX", "KILL", "BPT")


@dataclass(frozen=True)
class SASSInstruction:
    """One line. `target` is the address it may go to: that of a branch or call, or where a BSSY meets
    again."""
    address: int
    opcode: str
    modifiers: str
    operands: str
    guard: str = ""
    target: int | None = None

    @property
    def tensor_shape(self) -> tuple[int, int, int]:
        """Rows, columns and length of sums of the product that a tensor core makes; zeros for others."""
        found = SHAPE.search(self.modifiers) if self.opcode in TENSOR else None
        if found is None: return 0, 0, 0
        m, n, k = (int(extent) for extent in found.groups() if extent)
        return m, n, k

    @property
    def tensor_flops(self) -> int:
        """Operations that the tensor core does for one warp, 2 for a multiply-add; 0 for others."""
        m, n, k = self.tensor_shape
        return 2 * m * n * k // (4 if m == 64 else 1)

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        if self.guard not in ("", "@PT", "@UPT"): return True
        if self.opcode in WAYS_OUT: return False
        # a branch with a condition among its operands (BRA P1, …; BRA.DIV) may fall through
        return self.opcode != "BRA" or bool(self.modifiers) or "," in self.operands


Each = TypeVar("Each", bound=SASSInstruction)


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop, in the order of addresses. `around` is the fewest that a warp executes in an
    iteration that does all of the loop's tensor-core work."""
    instructions: tuple[SASSInstruction, ...]
    around: int

    @property
    def counts(self) -> Counter[str]:
        """How many of each opcode."""
        return Counter(each.opcode for each in self.instructions)

    @property
    def tensor(self) -> int:
        """Tensor-core instructions."""
        return sum(1 for each in self.instructions if each.opcode in TENSOR)

    def after_waits(self, name: str) -> list[tuple[int, int]]:
        """For each wait for wgmmas: how many groups it leaves in flight, and the instructions whose name
        begins with `name` (MUFU.EX2) from there to the next wait, the loop's first after its last."""
        made: list[tuple[int, int]] = []
        before = 0
        for each in self.instructions:
            if each.opcode == "WARPGROUP" and each.modifiers.startswith(".DEPBAR"):
                made.append((int(each.operands.rpartition(",")[2], 16), 0))
            elif (each.opcode + each.modifiers).startswith(name):
                if not made: before += 1
                else: made[-1] = (made[-1][0], made[-1][1] + 1)
        if made: made[-1] = (made[-1][0], made[-1][1] + before)
        return made

    @property
    def units(self) -> float:
        """Tensor-core work of a warp in quarters of 64 × 8 × 16."""
        return sum(each.tensor_flops for each in self.instructions) / UNIT


# **** text ****

def disassembler() -> Path | None:
    """nvdisasm or cuobjdump: NVIDIA's own, or else those that Triton brings."""
    for name in ("nvdisasm", "cuobjdump"):
        if (found := find_program(name)) is not None: return found
    spec = importlib.util.find_spec("triton")
    places = (spec.submodule_search_locations or ()) if spec else ()
    return next((found for place in places
                 if (found := Path(place) / "backends" / "nvidia" / "bin" / "nvdisasm").is_file()), None)


def disassemble(cubin: bytes, *more: str) -> str:
    """Returns the listing, with `more` that nvdisasm alone can print. Raises `ToolchainError` without a
    disassembler, and where it fails."""
    if (program := disassembler()) is None:
        raise ToolchainError("no disassembler is there", "nvdisasm, or the cuobjdump of a CUDA toolkit",
                             "pip install 'tinygrad-nv[emulator]'")
    flags = ("-sass",) if program.name == "cuobjdump" else ("-c", *more)
    if more and "-c" not in flags:
        raise ToolchainError("cuobjdump prints no lines of PTX", "nvdisasm",
                             "pip install 'tinygrad-nv[emulator]'")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(program), *flags, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{program.name} failed: {done.stderr.strip()}", "a disassembler for this cubin",
                             "install one as new as ptxas")
    return done.stdout


def functions(text: str) -> dict[str, list[SASSInstruction]]:
    """The instructions of each function of a listing; those before any heading are those of \"\"."""
    parts: dict[str, list[str]] = {}
    lines = parts.setdefault("", [])
    for line in text.splitlines():
        if (found := SECTION.match(line)) is not None: lines = parts.setdefault(found[1] or found[2], [])
        lines.append(line)
    made = {name: _instructions(lines) for name, lines in parts.items()}
    return {name: instructions for name, instructions in made.items() if instructions}


def _instructions(lines: Iterable[str]) -> list[SASSInstruction]:
    matched: list[tuple[re.Match[str], int]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in lines:
        if (label := LABEL.match(line)) is not None: waiting.append(label[1])
        elif (found := LINE.match(line)) is not None:
            address = int(found[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            matched.append((found, address))
    return _with_jumps([_instruction(found, address, labels) for found, address in matched])


def _with_jumps(code: list[SASSInstruction]) -> list[SASSInstruction]:
    """Calls of what never returns are branches: ptxas leaves loops of large kernels for sm_80 so."""
    if not any(each.opcode == "CALL" for each in code): return code
    made, follow = blocks(code)
    number = {block[0].address: i for i, block in enumerate(made)}

    def returns(target: int | None) -> bool:
        if target not in number: return True
        reached, open_ = {number[target]}, [number[target]]
        while open_:
            fresh = set(follow[open_.pop()]) - reached
            reached |= fresh
            open_ += fresh
        return any(each.opcode == "RET" for i in reached for each in made[i])
    return [replace(each, opcode="BRA", modifiers="") if each.opcode == "CALL" and not returns(each.target)
            else each for each in code]


def _instruction(found: re.Match[str], address: int, labels: Mapping[str, int]) -> SASSInstruction:
    _, guard, opcode, modifiers, operands = found.groups()
    target = None
    if opcode in ("BRA", "BSSY", "CALL") and (aims := AIM.findall(operands)):
        label, number = aims[-1]
        target = labels.get(label) if label else int(number, 16)
    return SASSInstruction(address, opcode, modifiers, operands, guard or "", target)


# **** blocks ****

def blocks(code: Sequence[Each]) -> tuple[list[list[Each]], list[list[int]]]:
    """Runs of instructions without a way in or out between, and the numbers of those that may follow each."""
    starts = {code[0].address} | {each.target for each in code if each.target is not None}
    starts |= {after.address for each, after in pairwise(code)
               if each.opcode in ("BRA", "BSYNC", *WAYS_OUT)}
    made: list[list[Each]] = []
    for each in code:
        if each.address in starts: made.append([])
        made[-1].append(each)
    number = {block[0].address: i for i, block in enumerate(made)}
    meets: dict[str, int | None] = {}  # where the last BSSY of each barrier before a BSYNC meets again
    follow = []
    for i, block in enumerate(made):
        for each in block:
            if each.opcode == "BSSY": meets[each.operands.split(",")[0]] = each.target
        last, nexts = block[-1], []
        if last.opcode == "BRA" and last.target in number: nexts.append(number[last.target])
        if last.opcode == "BSYNC" and (meet := meets.get(last.operands)) in number:
            nexts.append(number[meet])
        if last.goes_on and (last.opcode != "BSYNC" or not nexts or last.guard) and i + 1 < len(made):
            nexts.append(i + 1)
        follow.append(list(dict.fromkeys(nexts)))
    return made, follow


def dominators(follow: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each block, those that every way from the first passes; empty for what cannot be reached."""
    before: list[list[int]] = [[] for _ in follow]
    for i, nexts in enumerate(follow):
        for after in nexts: before[after].append(i)
    reached, open_ = {0}, [0]
    while open_:
        fresh = [after for after in follow[open_.pop()] if after not in reached]
        reached.update(fresh)
        open_ += fresh
    made: list[set[int]] = [set(reached) if i in reached else set() for i in range(len(follow))]
    made[0] = {0}
    changed = True
    while changed:
        changed = False
        for i in sorted(reached - {0}):
            ways = [made[j] for j in before[i] if j in reached]
            now = set.intersection(*ways) | {i}
            if now != made[i]: made[i], changed = now, True
    return made


def natural_loops(follow: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """The blocks of each loop, by its first."""
    passed = dominators(follow)
    found: dict[int, set[int]] = {}
    for latch, nexts in enumerate(follow):
        for head in nexts:
            if head not in passed[latch]: continue
            body = found.setdefault(head, {head})
            open_ = [latch]
            while open_:
                if (block := open_.pop()) in body: continue
                body.add(block)
                open_ += [i for i, after in enumerate(follow) if block in after and passed[i]]
    return found


# **** loops ****

def loops(code: Sequence[SASSInstruction]) -> list[Loop]:
    """The loops of a function, by the address of their first instruction."""
    if not code: return []
    parts, follow = blocks(code)
    return [_loop(parts, follow, head, body) for head, body in sorted(natural_loops(follow).items())]


def _loop(blocks: Sequence[list[SASSInstruction]], follow: Sequence[Sequence[int]], head: int,
          body: set[int]) -> Loop:
    inside = tuple(each for i in sorted(body) for each in blocks[i])
    return Loop(inside, _around(blocks, follow, head, body))


def _around(blocks: Sequence[list[SASSInstruction]], follow: Sequence[Sequence[int]], head: int,
            body: set[int]) -> int:
    """Instructions of the shortest of the ways from `head` back to it that do the most tensor-core work."""
    cost = {i: (-sum(each.tensor_flops for each in blocks[i]), len(blocks[i])) for i in body}
    best, waiting = {head: cost[head]}, [(head, frozenset((head,)))]
    ends: list[tuple[int, int]] = []
    while waiting:
        at, passed = waiting.pop()
        for after in follow[at]:
            if after == head: ends.append(best[at])
            if after not in body or after in passed: continue
            way = (best[at][0] + cost[after][0], best[at][1] + cost[after][1])
            if after in best and best[after] <= way: continue
            best[after] = way
            waiting.append((after, passed | {after}))
    return min(ends)[1]


def inner_loops(code: Sequence[SASSInstruction]) -> list[Loop]:
    """The innermost loops with tensor-core instructions."""
    working = [loop for loop in loops(code) if loop.tensor]
    places = [{each.address for each in loop.instructions} for loop in working]
    return [loop for loop, own in zip(working, places, strict=True)
            if not any(other < own for other in places)]


def main_loop(code: Sequence[SASSInstruction]) -> Loop | None:
    """The innermost loop with tensor-core instructions that does the most, of equals the one with the fewest
    others (the rest treat edges); None without one."""
    return max(inner_loops(code), key=lambda loop: (loop.units, -loop.around), default=None)
