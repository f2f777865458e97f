"""A page pool driven at random over simulated memories: the expected content of every page is known.

Protocol. `Drive(pool, …)` is a small engine: it opens sequences, launches steps ahead of their results, and
performs all operations of a block table, also while steps are in flight. Its memories hold one mark for each
position: a hash of the salt and all tokens up to it, as keys and values depend on them. A step does its
copies, then writes the marks of its tokens, and garbage as group padding. Each token must then find the marks
of all positions that it attends to, in the pages that the step was launched with. `check` asserts this for
every table after all queued steps, and that the pool's counts match the tables.

`operate(number, a, b, c)` is one operation; any numbers are valid.
"""
from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from tinygrad_nv.kvcache.block_table import BlockTable
from tinygrad_nv.kvcache.hybrid_table import SequenceTable
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.kvcache.pool import PagePool

GARBAGE = -1
STREAMS = [[random.Random(seed).randrange(3) for _ in range(200)] for seed in range(3)]
SEQUENCES, LONGEST, AHEAD = 6, 60, 2
A = list(range(100, 120))
B = list(range(200, 220))


def filled(pool: PagePool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table with all of these written."""
    table = pool.open(tokens, salt)
    assert isinstance(table, BlockTable)
    assert table.reserve(len(tokens))
    table.advance(tokens[table.computed:])
    return table


def copies(pool: PagePool) -> list[tuple[CopyKind, int, int]]:
    return [(copy.where, copy.source, copy.target) for copy in pool.take_copies()]


@dataclass
class Sequence:
    """Tokens, of which `in_flight` behind the computed ones are in launched steps. Tokens attend to positions
    from `first_visible` on, in groups of layers without a window. `epoch` counts how often its pages were
    given up."""
    table: SequenceTable
    salt: int
    tokens: list[int]
    in_flight: int = 0
    first_visible: int = 0
    epoch: int = 0

    def marks(self) -> list[int]:
        """The expected marks of its positions."""
        return list(accumulate(self.tokens, lambda mark, token: hash((mark, token)) & 0xFFFFFFFF,
                               initial=self.salt + 1))[1:]


@dataclass
class ScheduledTokens:
    """A sequence's part of a step: marks of all positions up to its last token, and of each group of layers
    the first visible position and the pages, as of the launch."""
    sequence: Sequence
    epoch: int
    start: int
    first_visible: list[int]
    marks: list[int]
    pages: list[list[int]]
    padded: int
    deferred: bool


@dataclass
class Step:
    number: int
    copies: tuple[PageCopy, ...]
    seqs: list[ScheduledTokens]


def of_group(mark: int, group: int) -> int:
    """The mark in pages of a group of layers."""
    return hash((mark, group)) if group else mark


@dataclass
class Memory:
    """Marks in the pages of a device and the host."""
    size: int
    device: list[list[int]]
    host: list[list[int]]

    def do(self, copies: tuple[PageCopy, ...]) -> None:
        for copy in copies:
            source = self.host if copy.where is CopyKind.HOST_TO_DEVICE else self.device
            target = self.host if copy.where is CopyKind.DEVICE_TO_HOST else self.device
            target[copy.target] = source[copy.source][:]

    def write(self, entry: ScheduledTokens, good: bool = True) -> None:
        """Writes the new tokens, and garbage up to the last padded position."""
        for position in range(entry.start, entry.padded):
            written = good and position < len(entry.marks)
            for group, pages in enumerate(entry.pages):
                mark = of_group(entry.marks[position], group) if written else GARBAGE
                self.device[pages[position // self.size]][position % self.size] = mark

    def holds(self, pages: list[list[int]], marks: list[int], first_visible: list[int],
              host: bool = False) -> bool:
        """Whether the pages of each group hold the marks from the first visible position on."""
        return all(self._holds(each, [of_group(mark, group) for mark in marks], first, host)
                   for group, (each, first) in enumerate(zip(pages, first_visible, strict=True)))

    def _holds(self, pages: list[int], marks: list[int], first_visible: int, host: bool) -> bool:
        """Whether positions from `first_visible` on hold the marks. `pages` starts with page 0."""
        memory, size = self.host if host else self.device, self.size
        first, at = first_visible // size, first_visible % size
        there: list[int] = []
        for page in pages[first:-(-len(marks) // size)]: there += memory[page]
        return there[at:len(marks) - first * size] == marks[first_visible:]

    def copy(self) -> Memory:
        return Memory(self.size, [page[:] for page in self.device], [page[:] for page in self.host])


@dataclass
class Drive:
    """An engine over `pool`. `group`: more than one new token is padded to whole groups."""
    pool: PagePool
    group: int = 4
    sequences: list[Sequence] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=deque)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.pool.page_size
        self.memory = Memory(size, [[GARBAGE] * size for _ in range(self.pool.device.total)],
                             [[GARBAGE] * size for _ in range(self.pool.host.total)])
        # marks of the last positions of all pages ever filled, and of those that must still be cached
        self.full: set[int] = set()
        self.sure: set[int] = set()
        self.operations = [self.step, self.step, self.step, self.complete, self.complete, self.open,
                           self.fork, self.abort, self.preempt, self.offload, self.restore, self.truncate,
                           self.prune, self.crash]

    def operate(self, number: int, a: int, b: int, c: int) -> None:
        """Performs one operation, if it applies."""
        operation = self.operations[number % len(self.operations)]
        if operation(a, b, c) is not False:
            self.counts[operation.__name__] = self.counts.get(operation.__name__, 0) + 1

    def first_visible(self, sequence: Sequence, position: int) -> list[int]:
        """Of each group of layers the first position that a token at `position` attends to."""
        return [sequence.first_visible if window is None else max(0, position - window + 1)
                for window in self.pool.windows]

    def one(self, a: int, away: bool | None = None, idle: bool = False) -> Sequence | None:
        """A sequence, if there is one."""
        fits = [each for each in self.sequences if away in (None, each.table.is_offloaded)
                and not (idle and each.in_flight)]
        return fits[a % len(fits)] if fits else None

    # **** sequences ****

    def open(self, a: int, b: int, c: int) -> bool:
        """A sequence that starts with a part of a stream."""
        if len(self.sequences) >= SEQUENCES: return False
        tokens = [*STREAMS[a % 3][:1 + b % 40], c % 3]
        salt = a // 3 % 4 // 3
        table = self.pool.open(tokens, bytes([salt]))
        made = Sequence(table, salt, tokens)
        self.sequences.append(made)
        self.shared(made)
        return True

    def shared(self, made: Sequence) -> None:
        """Checks the prefix cache hit against all pages ever filled."""
        table, size = made.table, self.pool.page_size
        made.first_visible = 0
        assert table.computed < len(made.tokens)
        assert table.computed % size == 0
        if not self.pool.sharing: return
        ends = made.marks()[size - 1:len(made.tokens) - 1:size]
        most, least = (next((i for i, end in enumerate(ends) if end not in marks), len(ends)) * size
                       for marks in (self.full, self.sure))
        assert table.computed <= most, "more was found than was ever filled"
        if not any(self.pool.windows) and not self.pool.device.evictions:
            assert table.computed >= least, f"{table.computed} tokens found, {least} are there"

    def fork(self, a: int, b: int, c: int) -> bool:
        """A sequence forked from another."""
        source = self.one(a)
        if source is None or len(self.sequences) >= SEQUENCES: return False
        table = source.table.fork()
        assert table.computed == source.table.computed
        tokens = [*source.tokens[:table.computed], b % 3]
        self.sequences.append(Sequence(table, source.salt, tokens, first_visible=source.first_visible))
        return True

    def abort(self, a: int, b: int, c: int) -> bool:
        if (other := self.one(a)) is None or b % 2: return False
        other.table.release()
        other.epoch += 1
        self.sequences.remove(other)
        return True

    def preempt(self, a: int, b: int, c: int) -> bool:
        """Frees the pages, and shares what is still cached."""
        if (other := self.one(a)) is None: return False
        self.discard_in_flight(other)
        other.table.release()
        other.table.share(other.tokens)
        self.shared(other)
        return True

    def discard_in_flight(self, sequence: Sequence) -> None:
        """Drops the tokens that launched steps sample for it."""
        if sequence.in_flight: del sequence.tokens[max(1, sequence.table.computed):]
        sequence.in_flight, sequence.epoch = 0, sequence.epoch + 1

    def offload(self, a: int, b: int, c: int) -> bool:
        if (other := self.one(a, away=False)) is None: return False
        if other.table.offload(): assert other.table.pages == [] or not other.table.unpruned_pages
        return True

    def restore(self, a: int, b: int, c: int) -> bool:
        return (other := self.one(a, away=True)) is not None and other.table.restore()

    def truncate(self, a: int, b: int, c: int) -> bool:
        if (cut := self.one(a, away=False, idle=True)) is None: return False
        table, tokens = cut.table, cut.table.computed - b % 8
        for each, first in zip(table.groups, self.first_visible(cut, tokens), strict=True):
            if tokens < max(1, first) or first < each.pruned * self.pool.page_size: return False
        if tokens < table.computed: self.sure.clear()
        table.truncate(tokens)
        cut.tokens = [*cut.tokens[:tokens], c % 3]
        return True

    def prune(self, a: int, b: int, c: int) -> bool:
        """Tokens no longer attend to positions before some point."""
        if b % 3 or (cut := self.one(a, away=False)) is None or any(self.pool.windows): return False
        before = cut.table.computed * (c % 5) // 4
        cut.first_visible = max(cut.first_visible, before)
        for each in cut.table.groups: each.prune(before)
        return True

    # **** steps ****

    def step(self, a: int, b: int, c: int) -> bool:
        """Launches a step of the sequences whose bits are set in `a`, with up to 1 + b % 12 new tokens each.
        """
        while len(self.steps) >= AHEAD: self.complete(0, 0, 0)
        number, size = self.pool.batch, self.pool.page_size
        seqs = []
        for bit, sequence in enumerate(self.sequences):
            if not a >> bit & 1 or sequence.table.is_offloaded: continue
            table, start = sequence.table, sequence.table.computed + sequence.in_flight
            rows = max(1, min(1 + b % 12, len(sequence.tokens) - start))
            chosen = start == len(sequence.tokens)
            # the table advances when the step is done
            deferred = chosen or sequence.in_flight > 0 or c % 3 == 0
            if start + rows > LONGEST: continue
            padded = start + (rows if rows == 1 else -(-rows // self.group) * self.group)
            held = len(set().union(*(each.table.unpruned_pages for each in self.sequences)))
            assert self.pool.available == self.pool.device.total - held
            at = None if b % 5 == 0 else start
            missing, free = table.num_missing_pages(padded, at), self.pool.available
            # a page that another sequence filled past this one's end
            later = [page for each in table.groups for page in each.pages[start // size:]]
            if any(self.pool.device.hashes[page] for page in later): self.sure.clear()
            if not table.reserve(padded, at):
                assert missing > free
                continue
            assert self.pool.available == free - missing
            assert all(len(each.pages) == table.num_entries for each in table.groups)
            assert table.num_entries * size >= padded
            if chosen: sequence.tokens.append((c >> bit) % 3)
            marks = sequence.marks()[:start + rows]
            seqs.append(ScheduledTokens(sequence, sequence.epoch, start, self.first_visible(sequence, start),
                                        marks, [each.pages[:] for each in table.groups], padded, deferred))
            if deferred: sequence.in_flight += rows
            else: self.advance(sequence, sequence.tokens[start:start + rows])
        self.steps.append(Step(number, self.pool.take_copies(), seqs))
        return True

    def advance(self, sequence: Sequence, tokens: list[int]) -> None:
        table, size = sequence.table, self.pool.page_size
        old = table.computed
        table.advance(tokens)
        marks = sequence.marks()
        filled = [marks[position] for position in range(old, table.computed) if position % size == size - 1]
        self.full.update(filled)
        self.sure.update(filled)

    def complete(self, a: int, b: int, c: int) -> bool:
        """Runs the oldest step."""
        if not self.steps: return False
        self.run(step := self.steps.popleft(), self.memory)
        for entry in step.seqs:
            sequence = entry.sequence
            if not entry.deferred or entry.epoch != sequence.epoch: continue
            sequence.in_flight -= len(entry.marks) - entry.start
            self.advance(sequence, sequence.tokens[entry.start:len(entry.marks)])
        return True

    def run(self, step: Step, memory: Memory) -> None:
        """Runs a step on a memory."""
        memory.do(step.copies)
        for entry in step.seqs: memory.write(entry)
        for entry in step.seqs:
            right = memory.holds(entry.pages, entry.marks, entry.first_visible)
            assert right, "a token read another sequence's content"

    def crash(self, a: int, b: int, c: int) -> bool:
        """The oldest step fails part-way, and those after it read garbage, or do not run."""
        if not self.steps or b % 4: return False
        number = self.steps[0].number
        for step in self.steps:
            self.memory.do(step.copies[:c % (len(step.copies) + 1)])
            for copy in step.copies[c % (len(step.copies) + 1):]:
                if a % 2: self.spoil(copy)
            for i, entry in enumerate(step.seqs):
                if a >> i & 2: self.memory.write(entry, good=False)
        self.steps.clear()
        for sequence in self.sequences: self.discard_in_flight(sequence)
        self.pool.recover(number, [sequence.table for sequence in self.sequences])
        for sequence in self.sequences:
            if not sequence.table.computed: sequence.first_visible = 0
            if sequence.table.computed >= len(sequence.tokens): sequence.tokens.append(0)
        self.sure.clear()
        return True

    def spoil(self, copy: PageCopy) -> None:
        """A failed copy."""
        target = self.memory.host if copy.where is CopyKind.DEVICE_TO_HOST else self.memory.device
        target[copy.target] = [GARBAGE] * self.pool.page_size

    # **** invariants ****

    def check(self, conserved: bool = True) -> None:
        """Asserts that no page is lost, and that every sequence finds its tokens."""
        if conserved: self.pool.assert_conserved([each.table for each in self.sequences])
        memory = self.memory.copy()
        for step in self.steps: self.run(step, memory)
        memory.do(tuple(self.pool.copies))
        for sequence in self.sequences:
            table, size = sequence.table, self.pool.page_size
            marks = sequence.marks()[:table.computed]
            assert len(marks) == table.computed
            pages = [[-1] * each.pruned + each.host_pages if table.is_offloaded else each.pages
                     for each in table.groups]
            visible = self.first_visible(sequence, table.computed)
            there = memory.holds(pages, marks, visible, table.is_offloaded)
            assert there, "a sequence's tokens are not in its pages"
            for each, first in zip(table.groups, visible, strict=True): assert first >= each.pruned * size

    def close(self) -> None:
        """Ends all sequences: every page is free or cached."""
        while self.steps: self.complete(0, 0, 0)
        for sequence in self.sequences: sequence.table.release()
        self.sequences.clear()
        self.check()
        assert self.pool.available == self.pool.device.total
        assert self.pool.host.available == self.pool.host.total


POOLS = {"small": {"pages": 12, "page_size": 4}, "host": {"pages": 14, "page_size": 4, "host_pages": 9},
         "window": {"pages": 16, "page_size": 4, "host_pages": 5, "windows": (10,)},
         "hybrid": {"pages": 34, "page_size": 4, "host_pages": 13, "windows": (6, None, 10)},
         "single": {"pages": 40, "page_size": 1, "host_pages": 20},
         "large": {"pages": 400, "page_size": 4}, "alone": {"pages": 20, "page_size": 8, "sharing": False}}


def driven(name: str, operations: int, seed: int = 0, every: int = 25, conserved: bool = True) -> Drive:
    """A drive after so many random operations, checked after every `every` of them."""
    draw = random.Random(seed).getrandbits
    drive = Drive(PagePool(**POOLS[name]))
    for count in range(operations):
        drive.operate(draw(16), draw(16), draw(16), draw(16))
        if not count % every: drive.check(conserved)
    drive.close()
    return drive
