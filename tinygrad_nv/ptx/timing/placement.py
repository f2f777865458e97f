"""Which SASS one execution of a block of PTX stands for.

Protocol: `ptx_blocks(function)` are the basic blocks of a PTX function; `placed(code, function)` puts each
block of SASS into the PTX block that most of its instructions come from, those of `WEIGHTS` counted heavier.
A conditional block that ptxas made into guards has no branch of its own in SASS and counts as the block that
branches around it. A block of SASS without lines goes with the one that dominates it.

`Placement.copies` has the instructions for each PTX block, in the order of one pass. Several blocks of SASS
follow one another (what ptxas makes branches for inside one instruction), or are copies (of an unrolled or
peeled loop), or are alternatives, of which the pass takes the one with most of WEIGHTS and then the shortest.
What only tries an mbarrier again, out of the way, is in no pass.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from tinygrad_nv.ptx.emulator.program import reverse_postorder
from tinygrad_nv.ptx.sass import TENSOR, WAYS_OUT, blocks, dominators, natural_loops
from tinygrad_nv.ptx.syntax import PTXFunction, Symbol
from tinygrad_nv.ptx.timing.instructions import TimedInstruction

# instructions that stay where they are, and how many others they outweigh
WEIGHTS = {**dict.fromkeys((*TENSOR, "SYNCS", "BAR", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UCGABAR_WAIT",
                            "UCGABAR_ARV"), 8),
           **dict.fromkeys(("LDGSTS", "LDGDEPBAR", "DEPBAR", "WARPGROUP", "MUFU", "LDS", "STS", "LDSM", "STSM",
                            "LDG", "STG", "ATOMS", "ATOMG", "ATOM", "RED", "REDG", "SHFL", "CCTL"), 4)}
INSERTED = ("BSSY", "BSYNC", "WARPSYNC", "NOP")  # where threads part and meet: their lines mean nothing
ENDS = ("bra", "brx", "ret", "exit", "trap")
Graph = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PTXBlock:
    """Instructions start … stop - 1 of a function's body, and the blocks that may follow."""
    start: int
    stop: int
    follow: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Instructions that stand for `executions` executions of a PTX block. A pass may leave out those whose
    addresses are in `skipped`: ptxas put a branch around them."""
    instructions: tuple[TimedInstruction, ...]
    executions: int = 1
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Placement:
    """A kernel's SASS by the blocks of its PTX. `hosts` has the PTX block of each block of SASS, None for what
    is never reached; `retries` are numbers of blocks of SASS; `homes` the PTX blocks of each line."""
    blocks: tuple[PTXBlock, ...]
    sass: tuple[tuple[TimedInstruction, ...], ...]
    hosts: tuple[int | None, ...]
    retries: frozenset[int]
    copies: tuple[tuple[Copy, ...], ...]
    homes: Mapping[int, tuple[int, ...]]

    @property
    def displaced(self) -> list[TimedInstruction]:
        """Instructions with a line of another PTX block than they are placed in."""
        return [each for host, block in zip(self.hosts, self.sass, strict=True) if host is not None
                for each in block if each.ptx_line and host not in self.homes[each.ptx_line]]


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


def _guarded(parts: Sequence[PTXBlock], branching: set[int]) -> dict[int, int]:
    """Blocks that became guards, and the blocks that branch around them. `branching` are the PTX blocks whose
    branches SASS has."""
    follow = [part.follow for part in parts]
    meets, found = _meets(follow), dict[int, int]()
    for i, ways in enumerate(follow):
        if len(ways) < 2 or i in branching: continue
        inside, left = set[int](), [way for way in ways if way != meets[i]]
        while left:
            if (at := left.pop()) in inside or at == meets[i]: continue
            inside.add(at)
            left += follow[at]
        if i in inside or inside & branching: continue
        found |= {at: found.get(i, i) for at in inside}
    return found


# **** SASS ****

def placed(code: Sequence[TimedInstruction], function: PTXFunction) -> Placement:
    """A kernel's instructions by the blocks of its PTX."""
    parts = ptx_blocks(function)
    lines = [tuple(each.line for each in function.body[part.start:part.stop]) for part in parts]
    sass, follow = blocks(code)
    leaving = {each.ptx_line for each in code if each.opcode in ("BRA", *WAYS_OUT)}
    guarded = _guarded(parts, {i for i, those in enumerate(lines) if those[-1] in leaving})
    homes: dict[int, tuple[int, ...]] = {}
    for i, those in enumerate(lines):
        home = guarded.get(i, i)
        for line in those: homes[line] = tuple(dict.fromkeys((*homes.get(line, ()), home)))
    hosts, retries = _hosts(sass, follow, homes), _retries(sass, follow)
    passes = _Passes(sass, follow, retries)
    copies = {host: passes.copies({i for i, other in enumerate(hosts) if other == host} - retries,
                                  {line for line, at in homes.items() if host in at})
              for host in {*hosts} - {None}}
    same = {those: i for i, those in reversed([*enumerate(lines)])}  # of a function that is called twice
    return Placement(parts, tuple(map(tuple, sass)), tuple(hosts), frozenset(retries),
                     tuple(copies.get(same[those], ()) for those in lines), homes)


def _hosts(sass: Sequence[Sequence[TimedInstruction]], follow: Graph,
           homes: Mapping[int, Sequence[int]]) -> list[int | None]:
    """The PTX block of each block of SASS."""
    passed = dominators(follow)
    made: list[int | None] = []
    for block in sass:
        votes: Counter[int] = Counter()
        for each in block:
            if each.opcode in INSERTED: continue
            for home in homes.get(each.ptx_line, ()): votes[home] += WEIGHTS.get(each.opcode, 1)
        made.append(min(votes, key=lambda home: (-votes[home], home), default=None))
    for i, above in enumerate(passed):
        if made[i] is not None: continue
        others = [j for j in above if made[j] is not None]
        if others: made[i] = made[max(others, key=lambda j: len(passed[j]))]
    return made


def _retries(sass: Sequence[Sequence[TimedInstruction]], follow: Graph) -> set[int]:
    """Loops that try an mbarrier again, entered by a branch where the first try failed, and their ways back."""
    before: list[list[int]] = [[] for _ in sass]
    for i, nexts in enumerate(follow):
        for after in nexts: before[after].append(i)
    found = set[int]()
    for head, body in natural_loops(follow).items():
        first = [i for i in before[head] if i not in body]
        work = {each.opcode for i in body for each in sass[i] if each.opcode in WEIGHTS}
        if work == {"SYNCS"} and all(map(_tries, (sass[i] for i in (*first, head)))) and \
                all(sass[i][-1].target == sass[head][0].address for i in first): found |= body
    return found | {i for i, block in enumerate(sass) if len(block) == 1 and block[0].opcode == "BRA"
                    and before[i] and found.issuperset(before[i])}


def _tries(block: Sequence[TimedInstruction]) -> bool:
    return any(each.opcode == "SYNCS" and ".PHASECHK" in each.modifiers for each in block)


class _Passes:
    """Ways through a kernel from its first block, without those back and those of threads that part."""

    def __init__(self, sass: Sequence[Sequence[TimedInstruction]], follow: Graph, retries: set[int]) -> None:
        self.sass, self.above = sass, dominators(follow)
        self.order = reverse_postorder(follow, 0)
        rank = {i: at for at, i in enumerate(self.order)}
        self.ways = {i: [j for j in follow[i] if rank[j] > rank[i] and j not in retries
                         and not (".DIV" in sass[i][-1].modifiers and j != i + 1)] for i in rank}

    def copies(self, mine: set[int], lines: set[int]) -> tuple[Copy, ...]:
        """The copies of a PTX block of these lines among its own blocks of SASS."""
        own = {i: {each.ptx_line for each in self.sass[i] if each.opcode not in INSERTED} & lines for i in mine}
        left, covered, made = set(mine), set[int](), list[Copy]()
        while path := self.path(left, own):
            left -= {*path}
            inside = set[int]().union(*(own[i] for i in path))
            if made and len(inside & covered) * 2 <= len(covered): continue  # an alternative
            covered |= inside
            made += [self.copy(some, own) for some in self.split(path, own)]
        return tuple(sorted(made, key=lambda copy: -copy.executions))

    def path(self, left: set[int], own: Mapping[int, set[int]]) -> list[int]:
        """The blocks among those left on the way with most of WEIGHTS, of most lines, of fewest
        instructions."""
        best: dict[int, tuple[tuple[int, int, int], int | None]] = {}
        for i in reversed(self.order):
            (work, fresh, length), after = max(((best[j][0], j) for j in self.ways[i]), default=((0, 0, 0), None))
            if i in left:
                work += sum(WEIGHTS.get(each.opcode, 0) for each in self.sass[i] if each.guard != "@!PT")
                fresh += len(own[i].difference(*(own[j] for j in self.above[i] & own.keys() - {i})))
                length -= len(self.sass[i])
            best[i] = (work, fresh, length), after
        at = max(left & best.keys(), key=lambda i: best[i][0], default=None)
        found = []
        while at is not None:
            if at in left: found.append(at)
            at = best[at][1]
        return found

    def split(self, path: Sequence[int], own: Mapping[int, set[int]]) -> list[list[int]]:
        """A way by copies: a block begins one that has most lines of those before it."""
        made, covered = [[path[0]]], set(own[path[0]])
        for i in path[1:]:
            if covered and len(own[i] & covered) * 2 > len(covered):
                made.append([])
                covered = set()
            covered |= own[i]
            made[-1].append(i)
        return made

    def copy(self, path: Sequence[int], own: Mapping[int, set[int]]) -> Copy:
        """One of them."""
        code = tuple(each for i in path for each in self.sass[i])
        skipped = {each.address for at, i in enumerate(path) for to in range(at + 2, len(path))
                   if path[to] in self.ways[i] for j in path[at + 1:to] for each in self.sass[j]}
        times = Counter((each.ptx_line, each.opcode) for i in path for each in self.sass[i]
                        if each.ptx_line in own[i] and each.guard != "@!PT")
        work = [count for (_, opcode), count in times.items() if opcode in WEIGHTS and opcode != "MUFU"]
        return Copy(code, min(work) if work else median_low(times.values() or (1,)), frozenset(skipped))
