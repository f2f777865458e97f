"""A pool of pages driven at random over memories that are kept by another: what every page holds is known.

Protocol. `Drive(pool, …)` is a small engine: it opens sequences, launches steps ahead of their results, and
does all that a table can, also while steps are under way. Its memories hold one mark a place, a hash of the
salt and of all tokens up to there, as keys and values depend on them. A step does its moves, then writes the
marks of its rows, and garbage where groups are padded; then each row must find the marks of all that it sees
in the pages that the step was launched with. `check` asserts it of every table as it will be when all that is
queued is done, and that the pool's counts are those of the tables.

`operate(number, a, b, c)` is one operation; any numbers will do.
"""
from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from tinygrad_nv.engine.scheduling.scheduler_output import CopyKind, PageCopy
from tinygrad_nv.kvcache.block_table import BlockTable
from tinygrad_nv.kvcache.pool import PagePool

GARBAGE = -1
STREAMS = [[random.Random(seed).randrange(3) for _ in range(200)] for seed in range(3)]
SEQUENCES, LONGEST, AHEAD = 6, 60, 2


@dataclass
class Sequence:
    """Tokens, of which steps under way have `flying` behind those computed; rows see places from `seen` on.
    `epoch` counts how often its pages were given up."""
    table: BlockTable
    salt: int
    tokens: list[int]
    flying: int = 0
    seen: int = 0
    epoch: int = 0

    def marks(self) -> list[int]:
        """What places must hold."""
        return list(accumulate(self.tokens, lambda mark, token: hash((mark, token)) & 0xFFFFFFFF,
                               initial=self.salt + 1))[1:]


@dataclass
class Rows:
    """A sequence's part of a step: marks of all places up to its last row, and pages, as they were."""
    sequence: Sequence
    epoch: int
    start: int
    seen: int
    marks: list[int]
    pages: list[int]
    padded: int
    late: bool


@dataclass
class Step:
    number: int
    copies: tuple[PageCopy, ...]
    seqs: list[Rows]


@dataclass
class Memory:
    """Marks of pages of a device and the host."""
    size: int
    device: list[list[int]]
    host: list[list[int]]

    def do(self, copies: tuple[PageCopy, ...]) -> None:
        for copy in copies:
            source = self.host if copy.where is CopyKind.HOST_TO_DEVICE else self.device
            target = self.host if copy.where is CopyKind.DEVICE_TO_HOST else self.device
            target[copy.target] = source[copy.source][:]

    def write(self, work: Rows, good: bool = True) -> None:
        """The rows, and garbage up to the last padded place."""
        for place in range(work.start, work.padded):
            mark = work.marks[place] if good and place < len(work.marks) else GARBAGE
            self.device[work.pages[place // self.size]][place % self.size] = mark

    def holds(self, pages: list[int], marks: list[int], seen: int, host: bool = False) -> bool:
        """Whether places from `seen` on hold the marks. `pages` begins with the first page that counts."""
        memory, size = self.host if host else self.device, self.size
        first, at = seen // size, seen % size
        there: list[int] = []
        for page in pages[first:-(-len(marks) // size)]: there += memory[page]
        return there[at:len(marks) - first * size] == marks[seen:]

    def copy(self) -> Memory:
        return Memory(self.size, [page[:] for page in self.device], [page[:] for page in self.host])


@dataclass
class Drive:
    """An engine over `pool`. `group`: rows of more than one are padded to whole groups."""
    pool: PagePool
    group: int = 4
    sequences: list[Sequence] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=deque)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.pool.page_size
        self.memory = Memory(size, [[GARBAGE] * size for _ in range(self.pool.device.total)],
                             [[GARBAGE] * size for _ in range(self.pool.host.total)])
        # marks of the last places of pages that were ever filled, and of those that nothing made be forgotten
        self.full: set[int] = set()
        self.sure: set[int] = set()
        self.operations = [self.step, self.step, self.step, self.complete, self.complete, self.open,
                           self.fork, self.abort, self.preempt, self.offload, self.restore, self.truncate,
                           self.prune, self.crash]

    def operate(self, number: int, a: int, b: int, c: int) -> None:
        """Does one operation, if there is anything to do it to."""
        operation = self.operations[number % len(self.operations)]
        if operation(a, b, c) is not False:
            self.counts[operation.__name__] = self.counts.get(operation.__name__, 0) + 1

    def one(self, a: int, away: bool | None = None, idle: bool = False) -> Sequence | None:
        """A sequence, if there is one."""
        fits = [each for each in self.sequences if away in (None, each.table.offloaded)
                and not (idle and each.flying)]
        return fits[a % len(fits)] if fits else None

    # **** sequences ****

    def open(self, a: int, b: int, c: int) -> bool:
        """A sequence that begins with a part of a stream."""
        if len(self.sequences) >= SEQUENCES: return False
        tokens = [*STREAMS[a % 3][:1 + b % 40], c % 3]
        salt = a // 3 % 4 // 3
        table = self.pool.open(tokens, bytes([salt]))
        made = Sequence(table, salt, tokens)
        self.sequences.append(made)
        self.shared(made)
        return True

    def shared(self, made: Sequence) -> None:
        """Holds what was found against all that was ever filled."""
        table, size, window = made.table, self.pool.page_size, self.pool.window
        made.seen = 0 if window is None else max(0, table.computed - window + 1)
        assert table.computed < len(made.tokens)
        assert table.computed % size == 0
        if not self.pool.sharing: return
        ends = made.marks()[size - 1:len(made.tokens) - 1:size]
        most, least = (next((i for i, end in enumerate(ends) if end not in marks), len(ends)) * size
                       for marks in (self.full, self.sure))
        assert table.computed <= most, "more was found than was ever filled"
        if window is None and not self.pool.device.evictions:
            assert table.computed >= least, f"{table.computed} tokens found, {least} are there"

    def fork(self, a: int, b: int, c: int) -> bool:
        """A sequence of what another's table has."""
        source = self.one(a)
        if source is None or len(self.sequences) >= SEQUENCES: return False
        table = source.table.fork()
        assert table.computed == source.table.computed
        tokens = [*source.tokens[:table.computed], b % 3]
        self.sequences.append(Sequence(table, source.salt, tokens, seen=source.seen))
        return True

    def abort(self, a: int, b: int, c: int) -> bool:
        if (gone := self.one(a)) is None or b % 2: return False
        gone.table.release()
        gone.epoch += 1
        self.sequences.remove(gone)
        return True

    def preempt(self, a: int, b: int, c: int) -> bool:
        """Gives the pages back, and finds what is left of them."""
        if (gone := self.one(a)) is None: return False
        self.forsake(gone)
        gone.table.release()
        gone.table.share(gone.tokens)
        self.shared(gone)
        return True

    def forsake(self, sequence: Sequence) -> None:
        """What steps under way choose for it does not count."""
        if sequence.flying: del sequence.tokens[max(1, sequence.table.computed):]
        sequence.flying, sequence.epoch = 0, sequence.epoch + 1

    def offload(self, a: int, b: int, c: int) -> bool:
        if (gone := self.one(a, away=False)) is None: return False
        if gone.table.offload(): assert gone.table.pages == [] or not gone.table.held_pages
        return True

    def restore(self, a: int, b: int, c: int) -> bool:
        return (gone := self.one(a, away=True)) is not None and gone.table.restore()

    def truncate(self, a: int, b: int, c: int) -> bool:
        if (cut := self.one(a, away=False, idle=True)) is None: return False
        table, window = cut.table, self.pool.window
        tokens = table.computed - b % 8
        seen = cut.seen if window is None else max(0, tokens - window + 1)
        if tokens < max(1, seen, table.pruned * self.pool.page_size * (window is None)): return False
        if seen < table.pruned * self.pool.page_size: return False
        if tokens < table.computed: self.sure.clear()
        table.truncate(tokens)
        cut.seen = seen
        cut.tokens = [*cut.tokens[:tokens], c % 3]
        return True

    def prune(self, a: int, b: int, c: int) -> bool:
        """Rows see nothing before some place any more."""
        if b % 3 or (cut := self.one(a, away=False)) is None or self.pool.window is not None: return False
        before = cut.table.computed * (c % 5) // 4
        cut.seen = max(cut.seen, before)
        cut.table.prune(before)
        return True

    # **** steps ****

    def step(self, a: int, b: int, c: int) -> bool:
        """Launches a step of the sequences whose bits are set in `a`, with up to 1 + b % 12 rows each."""
        while len(self.steps) >= AHEAD: self.complete(0, 0, 0)
        number, size = self.pool.batch, self.pool.page_size
        seqs = []
        for bit, sequence in enumerate(self.sequences):
            if not a >> bit & 1 or sequence.table.offloaded: continue
            table, start = sequence.table, sequence.table.computed + sequence.flying
            rows = max(1, min(1 + b % 12, len(sequence.tokens) - start))
            chosen = start == len(sequence.tokens)
            late = chosen or sequence.flying > 0 or c % 3 == 0     # advanced over when the step is done
            if start + rows > LONGEST: continue
            padded = start + (rows if rows == 1 else -(-rows // self.group) * self.group)
            held = len(set().union(*(each.table.held_pages for each in self.sequences)))
            assert self.pool.available == self.pool.device.total - held
            at = None if b % 5 == 0 else start
            missing, free = table.num_missing_pages(padded, at), self.pool.available
            # a page that another filled behind this one's end, and left
            if any(self.pool.device.hashes[page] for page in table.pages[start // size:]): self.sure.clear()
            if not table.reserve(padded, at):
                assert missing > free
                continue
            assert self.pool.available == free - missing
            assert len(table.pages) * size >= padded
            if chosen: sequence.tokens.append((c >> bit) % 3)
            marks = sequence.marks()[:start + rows]
            window = self.pool.window
            seen = sequence.seen if window is None else max(0, start - window + 1)
            seqs.append(Rows(sequence, sequence.epoch, start, seen, marks, table.pages[:], padded, late))
            if late: sequence.flying += rows
            else: self.advance(sequence, sequence.tokens[start:start + rows])
        self.steps.append(Step(number, self.pool.take_copies(), seqs))
        return True

    def advance(self, sequence: Sequence, tokens: list[int]) -> None:
        table, size, window = sequence.table, self.pool.page_size, self.pool.window
        old = table.computed
        table.advance(tokens)
        marks = sequence.marks()
        filled = [marks[place] for place in range(old, table.computed) if place % size == size - 1]
        self.full.update(filled)
        self.sure.update(filled)
        if window is not None: sequence.seen = max(0, table.computed - window + 1)

    def complete(self, a: int, b: int, c: int) -> bool:
        """Runs the oldest step."""
        if not self.steps: return False
        self.run(step := self.steps.popleft(), self.memory)
        for work in step.seqs:
            sequence = work.sequence
            if not work.late or work.epoch != sequence.epoch: continue
            sequence.flying -= len(work.marks) - work.start
            self.advance(sequence, sequence.tokens[work.start:len(work.marks)])
        return True

    def run(self, step: Step, memory: Memory) -> None:
        """What the device does."""
        memory.do(step.copies)
        for work in step.seqs: memory.write(work)
        for work in step.seqs:
            assert memory.holds(work.pages, work.marks, work.seen), "a row read what is not its sequence's"

    def crash(self, a: int, b: int, c: int) -> bool:
        """The oldest step ends somewhere, and those after it find garbage, or do not run at all."""
        if not self.steps or b % 4: return False
        number = self.steps[0].number
        for step in self.steps:
            self.memory.do(step.copies[:c % (len(step.copies) + 1)])
            for copy in step.copies[c % (len(step.copies) + 1):]:
                if a % 2: self.spoil(copy)
            for i, work in enumerate(step.seqs):
                if a >> i & 2: self.memory.write(work, good=False)
        self.steps.clear()
        for sequence in self.sequences: self.forsake(sequence)
        self.pool.recover(number, [sequence.table for sequence in self.sequences])
        for sequence in self.sequences:
            table, window = sequence.table, self.pool.window
            if not table.computed: sequence.seen = 0
            elif window is not None: sequence.seen = max(0, table.computed - window + 1)
            if table.computed >= len(sequence.tokens): sequence.tokens.append(0)
        self.sure.clear()
        return True

    def spoil(self, copy: PageCopy) -> None:
        """A copy that went wrong."""
        target = self.memory.host if copy.where is CopyKind.DEVICE_TO_HOST else self.memory.device
        target[copy.target] = [GARBAGE] * self.pool.page_size

    # **** what holds ****

    def check(self, conserved: bool = True) -> None:
        """Asserts that nothing is lost, and that every sequence finds its tokens."""
        if conserved: self.pool.assert_conserved([each.table for each in self.sequences])
        memory = self.memory.copy()
        for step in self.steps: self.run(step, memory)
        memory.do(tuple(self.pool.copies))
        for sequence in self.sequences:
            table, size = sequence.table, self.pool.page_size
            marks = sequence.marks()[:table.computed]
            assert len(marks) == table.computed
            pages = [-1] * table.pruned + table.host_pages if table.offloaded else table.pages
            there = memory.holds(pages, marks, sequence.seen, table.offloaded)
            assert there, "a sequence's tokens are not in its pages"
            assert sequence.seen >= table.pruned * size

    def close(self) -> None:
        """Ends all sequences: every page is free or cached."""
        while self.steps: self.complete(0, 0, 0)
        for sequence in self.sequences: sequence.table.release()
        self.sequences.clear()
        self.check()
        assert self.pool.available == self.pool.device.total
        assert self.pool.host.available == self.pool.host.total


POOLS = {"small": {"pages": 12, "page_size": 4}, "host": {"pages": 14, "page_size": 4, "host_pages": 9},
         "window": {"pages": 16, "page_size": 4, "host_pages": 5, "window": 10},
         "single": {"pages": 40, "page_size": 1, "host_pages": 20},
         "large": {"pages": 400, "page_size": 4}, "alone": {"pages": 20, "page_size": 8, "sharing": False}}


def driven(name: str, operations: int, seed: int = 0, every: int = 25, conserved: bool = True) -> Drive:
    """A drive after so many random operations, checked after `every` of them."""
    draw = random.Random(seed).getrandbits
    drive = Drive(PagePool(**POOLS[name]))
    for count in range(operations):
        drive.operate(draw(16), draw(16), draw(16), draw(16))
        if not count % every: drive.check(conserved)
    drive.close()
    return drive
