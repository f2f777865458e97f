"""SASS instructions that one execution of a block of PTX stands for.

Protocol: `ptx_blocks(function)` are the basic blocks of a PTX function; `placed(code, function)` puts each
block of SASS into the PTX block that most of its instructions come from, those of `WEIGHTS` counted heavier.
A block of SASS without lines goes with the nearest that dominates it and is in no loop that it is outside of.
Some PTX blocks are within others, and have no SASS of their own: those that ptxas made guards of, and what
follows them without another way in (the block that would branch around has them); a loop of tries at an
mbarrier whose first ptxas took out (the block that leads there has it).

`Placement.copies` has the SASS of each PTX block in the order of one pass. Blocks of SASS follow one another
(where one PTX instruction becomes branches), or are copies (of an unrolled or peeled loop), or alternatives,
of which the pass takes that with most of WEIGHTS, then of most lines, then the shortest. What only tries an
mbarrier again, out of the way, is in no pass.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from tinygrad_nv.ptx.sass import TENSOR, WAYS_OUT, blocks, dominators, natural_loops
from tinygrad_nv.ptx.syntax import PTXFunction, Symbol
from tinygrad_nv.ptx.timing.instructions import TimedInstruction

# instructions that stay where they are, and how many others each outweighs
SYNC = ("SYNCS", "BAR", "LDGDEPBAR", "DEPBAR")
MEMORY = ("LDGSTS", "LDS", "STS", "LDSM", "STSM", "LDG", "STG", "ATOMS", "ATOMG", "ATOM", "RED", "REDG",
          "SHFL")
FLOAT = ("FFMA", "FADD", "FMUL", "MUFU", "DFMA", "DADD", "DMUL")    # one for one of PTX, but in divisions
WEIGHTS = {**dict.fromkeys((*MEMORY, "MUFU", "WARPGROUP", "CCTL"), 4),
           **dict.fromkeys((*TENSOR, *SYNC, "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UCGABAR_ARV",
                            "UCGABAR_WAIT"), 8)}
CALL = 100  # instructions that one counts as where a way is chosen
INSERTED = ("BSSY", "BSYNC", "WARPSYNC", "NOP")  # where threads part and meet: their lines mean nothing
LEAVING = ("BRA", *WAYS_OUT)
ENDS = ("bra", "brx", "ret", "exit", "trap")
Key = tuple[int, str]  # line and opcode
Graph = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PTXBlock:
    """Instructions start … stop - 1 of a function's body, and the blocks that may follow."""
    start: int
    stop: int
    follow: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Instructions that stand for `executions` executions of a PTX block: of those in a row, as many as are
    left. A pass may leave out those whose addresses are in `skipped`: ptxas put a branch around them."""
    instructions: tuple[TimedInstruction, ...]
    executions: int = 1
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Placement:
    """A kernel's SASS by the blocks of its PTX. `hosts` has the PTX block of each block of SASS, None for
    what is never reached; `retries` are numbers of blocks of SASS. `waits` are PTX blocks that only try an
    mbarrier: executions in a row count once. `homes` has the PTX blocks that each line counts as."""
    blocks: tuple[PTXBlock, ...]
    sass: tuple[tuple[TimedInstruction, ...], ...]
    hosts: tuple[int | None, ...]
    retries: frozenset[int]
    waits: frozenset[int]
    copies: tuple[tuple[Copy, ...], ...]
    homes: Mapping[int, tuple[int, ...]]

    @property
    def out_of_place(self) -> list[TimedInstruction]:
        """Instructions with a line of another PTX block than they are placed in."""
        return [each for host, block in zip(self.hosts, self.sass, strict=True) if host is not None
                for each in block if each.ptx_line and each.opcode not in INSERTED
                and host not in self.homes.get(each.ptx_line, (host,))]


# **** PTX ****

def ptx_blocks(function: PTXFunction) -> tuple[PTXBlock, ...]:
    """Basic blocks: they begin at targets of branches and after what may leave. Labels that no branch names
    begin none."""
    body, aims = function.body, {}
    for i, each in enumerate(body):
        if each.mnemonic not in ENDS: continue
        names = [operand.name for operand in each.operands if isinstance(operand, Symbol)]
        if each.mnemonic == "brx": names = [label for name in names for label in function.tables[name]]
        aims[i] = [function.labels[name] for name in names]
    starts = sorted({0, *(i + 1 for i in aims), *(at for ats in aims.values() for at in ats)} - {len(body)})
    number = {start: i for i, start in enumerate(starts)}
    made = []
    for start, stop in pairwise((*starts, len(body))):
        ways = [number[at] for at in aims.get(stop - 1, ()) if at in number]
        if (stop - 1 not in aims or body[stop - 1].guard is not None) and stop in number:
            ways.append(number[stop])
        made.append(PTXBlock(start, stop, tuple(dict.fromkeys(ways))))
    return tuple(made)


def _meets(follow: Graph) -> list[int | None]:
    """The nearest block that every way on from a block passes; None where there is none before the end."""
    end = len(follow)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for i, nexts in enumerate(follow):
        for after in nexts or (end,): before[after].append(i)
    # the end is number 0 of the graph turned round
    turned = [[end - i for i in before[end - j]] for j in range(end + 1)]
    passed = dominators(turned)
    def nearest(i: int) -> int | None:
        others = passed[end - i] - {end - i}
        best = end - max(others, key=lambda j: len(passed[j]), default=0)
        return None if best == end else best
    return [nearest(i) for i in range(end)]


def _find_guards(parts: Sequence[PTXBlock], branching: set[int]) -> dict[int, int]:
    """Blocks that became guards, and the blocks that branch around them. `branching` are the PTX blocks whose
    branches SASS has."""
    follow = [part.follow for part in parts]
    meets, found = _meets(follow), dict[int, int]()
    before = [{i for i, nexts in enumerate(follow) if at in nexts} for at in range(len(follow))]
    for i, ways in enumerate(follow):
        if len(ways) < 2 or i in branching: continue
        inside, left = set[int](), [way for way in ways if way != meets[i]]
        while left:
            if (at := left.pop()) in inside or at == meets[i]: continue
            inside.add(at)
            left += follow[at]
        if i in inside or inside & branching: continue
        joined = {at for at, those in enumerate(before) if at == meets[i] and those <= {i} | inside}
        found |= dict.fromkeys(inside | joined, i)
    return found


def _waits(parts: Sequence[PTXBlock], function: PTXFunction) -> dict[int, set[int]]:
    """Loops that only try an mbarrier, by their first block."""
    found = natural_loops([part.follow for part in parts])
    return {head: loop for head, loop in found.items() if {"mbarrier", "bra"} == {
        each.mnemonic for i in loop for each in function.body[parts[i].start:parts[i].stop]}}


def _find_awaited_loops(parts: Sequence[PTXBlock], waits: Mapping[int, set[int]]) -> dict[int, int]:
    """The loops whose first try ptxas took out, and the blocks that alone lead there: those end with it."""
    found = dict[int, int]()
    for head, loop in waits.items():
        first = [i for i, part in enumerate(parts) if head in part.follow and i not in loop]
        if len(first) == 1 and parts[first[0]].follow == (head,):
            found |= dict.fromkeys(loop, first[0])
    return found


# **** SASS ****

def place_instructions(code: Sequence[TimedInstruction], function: PTXFunction) -> Placement:
    """Returns a kernel's instructions by the blocks of its PTX."""
    parts = ptx_blocks(function)
    lines = [tuple(each.line for each in function.body[part.start:part.stop]) for part in parts]
    sass, follow = blocks(code)
    retries, waits = _retries(sass, follow), _waits(parts, function)
    again = {each.ptx_line for i in retries for each in sass[i]}
    leaving = {each.ptx_line for each in code if each.opcode in LEAVING}
    within = _find_guards(parts, {i for i, those in enumerate(lines) if those[-1] in leaving})
    within |= _find_awaited_loops(parts,
                                  {head: loop for head, loop in waits.items() if again & {*lines[head]}})
    homes: dict[int, tuple[int, ...]] = {}
    for i, those in enumerate(lines):
        while i in within: i = within[i]
        for line in those: homes[line] = tuple(dict.fromkeys((*homes.get(line, ()), i)))
    hosts = _hosts(sass, follow, retries, homes)
    passes = _Passes(sass, follow, retries)
    copies = {host: passes.copies({i for i, other in enumerate(hosts) if other == host} - retries,
                                  {line for line, at in homes.items() if host in at})
              for host in {*hosts} if host is not None}
    same = {those: i for i, those in reversed([*enumerate(lines)])}  # of a function that is called twice
    return Placement(parts, tuple(map(tuple, sass)), tuple(hosts), frozenset(retries),
                     frozenset(i for loop in waits.values() for i in loop),
                     tuple(copies.get(same[those], ()) for those in lines), homes)


def _hosts(sass: Sequence[Sequence[TimedInstruction]], follow: Graph, retries: set[int],
           homes: Mapping[int, Sequence[int]]) -> list[int | None]:
    """The PTX block of each block of SASS. One that ends with a first try is where the try is; one without
    lines is where the nearest is that dominates it, and is in no loop that it is not in."""
    passed, loops = dominators(follow), natural_loops(follow)
    # lines of branches back: outside of their loops, they only repeat
    backs = {sass[i][-1].ptx_line: loop for head, loop in loops.items() for i in loop if head in follow[i]}
    made: list[int | None] = []
    for i, block in enumerate(sass):
        tried = [each for each in block if _has_try_wait((each,)) and retries.intersection(follow[i])]
        votes: Counter[int] = Counter()
        for each in tried[-1:] or block:
            if each.opcode in INSERTED or i not in backs.get(each.ptx_line, {i}): continue
            weight = 4 if each.guard and each.opcode in LEAVING else WEIGHTS.get(each.opcode, 1)
            for home in homes.get(each.ptx_line, ()): votes[home] += weight
        made.append(min(votes, key=lambda home: (-votes[home], home), default=None))
    for i, above in enumerate(passed):
        if made[i] is not None: continue
        others = [j for j in above if made[j] is not None
                  and all(i in loop for loop in loops.values() if j in loop)]
        if others: made[i] = made[max(others, key=lambda j: len(passed[j]))]
    return made


def _retries(sass: Sequence[Sequence[TimedInstruction]], follow: Graph) -> set[int]:
    """Loops that try an mbarrier again, entered by a branch where the first try failed, and their ways
    back."""
    before: list[list[int]] = [[] for _ in sass]
    for i, nexts in enumerate(follow):
        for after in nexts: before[after].append(i)
    found = set[int]()
    for head, body in natural_loops(follow).items():
        first = [i for i in before[head] if i not in body]
        work = {each.opcode for i in body for each in sass[i] if each.opcode in WEIGHTS}
        if work == {"SYNCS"} and all(map(_has_try_wait, (sass[i] for i in (*first, head)))) and \
                all(sass[i][-1].target == sass[head][0].address for i in first): found |= body
    return found | {i for i, block in enumerate(sass) if len(block) == 1 and block[0].opcode == "BRA"
                    and before[i] and found.issuperset(before[i])}


def _has_try_wait(block: Sequence[TimedInstruction]) -> bool:
    return any(each.opcode == "SYNCS" and ".PHASECHK" in each.modifiers for each in block)


class _Passes:
    """Ways through a kernel from its first block, without those back and those of threads that part."""

    def __init__(self, sass: Sequence[Sequence[TimedInstruction]], follow: Graph, retries: set[int]) -> None:
        self.sass, self.above = sass, dominators(follow)
        self.loops = sorted(natural_loops(follow).values(), key=len)
        self.number = {block[0].address: i for i, block in enumerate(sass)}
        self.order = reverse_postorder(follow, 0)
        for each in (each for block in sass for each in block if each.opcode == "CALL"):
            if (to := self.number.get(each.target or 0, self.order[0])) not in self.order:
                self.order = [*dict.fromkeys((*self.order, *reverse_postorder(follow, to)))]
        rank = {i: at for at, i in enumerate(self.order)}
        self.ways = {i: [j for j in follow[i] if rank[j] > rank[i] and j not in retries
                         and not (".DIV" in sass[i][-1].modifiers and j != i + 1)] for i in rank}

    def copies(self, mine: set[int], lines: set[int]) -> tuple[Copy, ...]:
        """The copies of a PTX block of these lines among its own blocks of SASS."""
        own = {i: {(each.ptx_line, each.opcode) for each in self.sass[i]
                   if each.ptx_line in lines and each.opcode not in INSERTED} for i in mine}
        work = {i: {key for key in keys if key[1] in WEIGHTS} for i, keys in own.items()}
        marks = work if any(work.values()) else own
        left, covered, made = set(mine), set[Key](), list[Copy]()
        while path := self.path(left, own):
            left -= {*path}
            inside = set[Key]().union(*(marks[i] for i in path))
            if made and len(inside & covered) * 2 <= len(covered): continue  # an alternative
            covered |= inside
            made += [self.copy(self.loop_part(some, marks), own) for some in split(path, marks)]
        return tuple(sorted(made, key=lambda copy: -copy.executions))

    def path(self, left: set[int], own: Mapping[int, set[Key]]) -> list[int]:
        """The blocks among those left on the way with most of WEIGHTS, of most lines, of fewest
        instructions."""
        best: dict[int, tuple[tuple[int, int, int], int | None]] = {}
        for i in reversed(self.order):
            ways = [(best[j][0], j) for j in self.ways[i]]
            (work, fresh, length), after = max(ways) if ways else ((0, 0, 0), None)
            if i in left:
                work += sum(WEIGHTS.get(each.opcode, 0) for each in self.sass[i] if each.guard != "@!PT")
                before = {line for j in self.above[i] & own.keys() - {i} for line, _ in own[j]}
                fresh += len({line for line, _ in own[i]} - before)
                length -= sum(CALL if each.opcode == "CALL" else 1 for each in self.sass[i])
            best[i] = (work, fresh, length), after
        at = max(left & best.keys(), key=lambda i: best[i][0], default=None)
        found = []
        while at is not None:
            if at in left: found.append(at)
            at = best[at][1]
        return found

    def loop_part(self, path: Sequence[int], marks: Mapping[int, set[Key]]) -> Sequence[int]:
        """The part of a way that is in the loop of most of what it does: not what leads there, and on."""
        most = max(path, key=lambda i: sum((each.ptx_line, each.opcode) in marks[i] for each in self.sass[i]))
        loop = next((loop for loop in self.loops if most in loop), None)
        return path if loop is None else [i for i in path if i in loop]

    def copy(self, path: Sequence[int], own: Mapping[int, set[Key]]) -> Copy:
        """One of them."""
        code = tuple(some for i in path for each in self.sass[i] for some in (each, *self.callee(each)))
        skipped = {each.address for at, i in enumerate(path) for to in range(at + 2, len(path))
                   if path[to] in self.ways[i] for j in path[at + 1:to] for each in self.sass[j]}
        times = Counter((each.ptx_line, each.opcode) for i in path for each in self.sass[i]
                        if (each.ptx_line, each.opcode) in own[i] and each.guard != "@!PT")
        surest = [min(times.values(), default=1)]
        if floats := [count for (_, opcode), count in times.items() if opcode in FLOAT]:
            surest = [min(floats)]
        for kind in (MEMORY, SYNC):
            surest = [count for (_, opcode), count in times.items() if opcode in kind] or surest
        return Copy(code, median_low(surest) if len(times) > 2 else 1, frozenset(skipped))

    def callee(self, call: TimedInstruction) -> Iterator[TimedInstruction]:
        """Yields what a call executes."""
        if call.opcode != "CALL" or call.target not in self.number: return
        left, inside = [self.number[call.target]], dict[int, set[Key]]()
        while left:
            if (i := left.pop()) in inside: continue
            inside[i] = {(each.ptx_line, each.opcode) for each in self.sass[i]}
            left += self.ways[i]
        for i in self.path({*inside}, inside):
            for each in self.sass[i]: yield from (each, *self.callee(each))


def split(path: Sequence[int], marks: Mapping[int, set[Key]]) -> list[list[int]]:
    """A way by copies: a block begins one that has most of what those before it have. Between several, what
    only leads to the next is left out."""
    made, covered = [[path[0]]], set(marks[path[0]])
    for i in path[1:]:
        if covered and len(marks[i] & covered) * 2 > len(covered):
            made.append([])
            covered = set()
        covered |= marks[i]
        made[-1].append(i)
    return made if len(made) == 1 else [[i for i in some if marks[i]] for some in made]


def reverse_postorder(edges: Sequence[Sequence[int]], root: int) -> list[int]:
    """Depth-first order without recursion."""
    seen, out, stack = {root}, [], [(root, iter(edges[root]))]
    while stack:
        node, rest = stack[-1]
        for other in rest:
            if other not in seen:
                seen.add(other)
                stack.append((other, iter(edges[other])))
                break
        else:
            out.append(node)
            stack.pop()
    return out[::-1]
