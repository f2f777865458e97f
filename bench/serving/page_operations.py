"""Page operations at random, as many as asked for, against a model of what each page is for.

    python bench/serving/page_operations.py --operations 100000000 --seed 1

Pure Python, no device. An operation is one page taken, shared, dropped, or looked up without being found. A
small engine (`Load`) opens sequences whose prompts have common prefixes, and does with them what the engine
does: chunks of a prompt, single tokens, drafts that are rejected, forks that copy on write, preemption with
and without the host, windows, edits, clients that leave, failed batches, an emptied prefix cache. Four pools
take turns: `POOLS`. The model is apart from the allocator:

    held        how often each page is held. A taken page must not be, a dropped one must; after each
                operation used + free + cached = total
    content     what was written to a page: its tokens, and a number for all tokens before it. A page found by
                its hash must have the content that the prompt says, and a page that is written one owner

Every `CHECK_EVERY` operations the pages in all block tables are counted. At the end of each pool's turn all
sequences leave: every page must be free or cached. Exits with 1 at the first difference.
"""
from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, table
from bench.serving.checked_pages import CheckedPages
from tinygrad_nv.kvcache.hybrid_table import SequenceTable
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.runtime.memory import resident_bytes

CHECK_EVERY = 20_000
TURN = 500_000              # operations of a pool, before the next pool's turn
BUDGET = 512                # tokens of a batch
RUNNING = 40                # sequences at most
PREFIXES = 24
GARBAGE = (-1, -1, ())
POOLS: dict[str, dict[str, Any]] = {
    "plain": {"pages": 1200, "page_size": 16},
    "host": {"pages": 400, "page_size": 16, "host_pages": 300},
    "window": {"pages": 500, "page_size": 8, "host_pages": 100, "windows": (200,)},
    "hybrid": {"pages": 1500, "page_size": 8, "host_pages": 300, "windows": (None, 64, 200)}}
Content = tuple[int, int, tuple[int, ...] | list[int]]      # group, all tokens before the page, its tokens


@dataclass(eq=False)
class Sequence:
    """A sequence that ends with `length` tokens, and forks into `branches` more after its prompt."""
    table: SequenceTable
    salt: int
    tokens: list[int]
    length: int
    branches: int
    size: int
    before: list[int] = field(default_factory=list)     # of each page: a number for all tokens before it

    def content(self, page: int, end: int, group: int) -> Content:
        """Returns the tokens that this page must hold, with tokens up to position `end`."""
        size, before = self.size, self.before
        if not before: before.append(hash((self.salt, -7)))
        while len(before) <= page:
            at = (len(before) - 1) * size
            before.append(hash((before[-1], *self.tokens[at:at + size])))
        return group, before[page], self.tokens[page * size:min(end, (page + 1) * size)]

    def cut(self, tokens: int) -> None:
        """Forgets the tokens from this position on."""
        del self.tokens[tokens:]
        del self.before[tokens // self.size + 1:]


@dataclass
class Write:
    """The positions of a sequence that a batch writes, and its pages at that time."""
    sequence: Sequence
    start: int
    end: int
    pages: list[list[int]]


class Load:
    """A small engine over a pool, which does something at random in each `step`."""

    def __init__(self, pool: PagePool, random_: random.Random) -> None:
        pool.device, pool.host = CheckedPages(pool.device.total), CheckedPages(pool.host.total)
        self.device, self.host = pool.device, pool.host
        self.pool, self.random, self.size = pool, random_, pool.page_size
        self.prefixes = [[random_.randrange(50_000) for _ in range(random_.randint(2, 60) * self.size)]
                         for _ in range(PREFIXES)]
        # equal pages behind other ones are other pages
        self.prefixes += [[7] * self.size + each[self.size:] for each in self.prefixes]
        self.running: list[Sequence] = []
        self.preempted: deque[Sequence] = deque()
        self.content: dict[bool, list[Content]] = {False: [GARBAGE] * self.device.total,
                                                   True: [GARBAGE] * self.host.total}
        self.counts: Counter[str] = Counter()

    @property
    def operations(self) -> int:
        """Page operations so far."""
        return sum(self.device.counts.values()) + sum(self.host.counts.values()) + self.counts["missed"]

    @property
    def tables(self) -> list[SequenceTable]:
        """The block tables of all sequences."""
        return [each.table for each in (*self.running, *self.preempted)]

    # **** sequences ****

    def arrive(self) -> None:
        """Opens a sequence, whose prompt begins as others do, or is one that was there."""
        random_ = self.random
        common = random_.choice(self.prefixes)
        prompt = common[:random_.randint(1, len(common))] if random_.random() < 0.3 else common[:]
        prompt += [random_.randrange(50_000) for _ in range(random_.choice((1, 7, 40, 300)))]
        salt = int(random_.random() < 0.1)
        length = len(prompt) + random_.choice((1, 20, 100, 250))
        made = Sequence(self.pool.open(prompt, bytes([salt])), salt, prompt, length,
                        random_.choice((0, 0, 0, 0, 1, 3)), self.size)
        self.check_lookup(made)
        self.running.append(made)

    def check_lookup(self, sequence: Sequence) -> None:
        """Checks what the prefix cache found. A lookup ends with the first page that is not there."""
        found = sequence.table.computed
        assert found < len(sequence.tokens)
        self.counts["hits"] += bool(found)
        self.counts["missed"] += found // self.size < (len(sequence.tokens) - 1) // self.size

    def leave(self, sequence: Sequence) -> None:
        """A sequence that ended, or whose client is gone."""
        sequence.table.release()
        self.running.remove(sequence)

    def fork(self, sequence: Sequence) -> None:
        """Samples of one prompt, which share its pages until they write."""
        for number in range(sequence.branches):
            table = sequence.table.fork()
            made = Sequence(table, sequence.salt, [*sequence.tokens[:table.computed], number],
                            sequence.length, 0, self.size)
            self.running.append(made)
        self.counts["forks"] += sequence.branches
        sequence.branches = 0

    def preempt(self, sequence: Sequence) -> None:
        """Moves its pages to the host, or frees them."""
        if self.random.random() < 0.7 and sequence.table.offload(): self.counts["offloads"] += 1
        else: sequence.table.release()
        self.counts["preemptions"] += 1
        self.running.remove(sequence)
        self.preempted.appendleft(sequence)

    def resume(self) -> bool:
        """Fetches the pages of the first preempted sequence, or those that are still cached. False without
        pages for it."""
        sequence = self.preempted[0]
        if sequence.table.num_missing_pages(len(sequence.tokens)) > self.pool.available: return False
        if sequence.table.is_offloaded:
            if not sequence.table.restore(): return False
        elif not sequence.table.num_entries:
            sequence.table.share(sequence.tokens)
            self.check_lookup(sequence)
        self.running.append(self.preempted.popleft())
        return True

    # **** a batch ****

    def step(self) -> None:
        """Something at random, then a batch."""
        random_ = self.random
        if self.preempted: self.resume()
        elif len(self.running) < RUNNING and random_.random() < 0.5: self.arrive()
        if self.running and random_.random() < 0.02: self.leave(random_.choice(self.running))
        if self.preempted and random_.random() < 0.02: self.preempted.pop().table.release()
        if self.running and random_.random() < 0.03: self.edit(random_.choice(self.running))
        if random_.random() < 0.0005: self.pool.forget_prefixes()
        number, writes = self.pool.batch, self.schedule()
        copies = self.pool.take_copies()
        if random_.random() < 0.003: return self.fail(number, copies, writes)
        self.copy(copies)
        for write in writes: self.write(write)
        for write in writes: self.read(write)
        for write in writes: self.finish(write)

    def schedule(self) -> list[Write]:
        """Reserves what the batch writes. Sequences at the end of the queue are preempted for those before
        them."""
        budget, writes, at = BUDGET, list[Write](), 0
        while at < len(self.running) and budget > 0:
            if (write := self.reserve(self.running[at], budget, at)) is None: break
            writes.append(write)
            budget -= write.end - write.start
            at += 1
        return writes

    def reserve(self, sequence: Sequence, budget: int, at: int) -> Write | None:
        """Reserves a chunk of the prompt, or some tokens and drafts behind them. None if the pool is out of
        pages, although all sequences behind this one were preempted; then it is preempted itself."""
        random_, table_, start = self.random, sequence.table, sequence.table.computed
        if start >= len(sequence.tokens) - 1:
            new = random_.randint(1, 12)
            sequence.tokens += [random_.randrange(50_000) for _ in range(new)]
            drafts = random_.choice((0, 0, 4))
        else: drafts = 0
        end = min(len(sequence.tokens), start + budget)
        while not table_.reserve(end + drafts):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence: return None
        for each in table_.groups:
            for page in each.pages[start // self.size:]:
                assert self.device.held[page] == 1, f"page {page} is written, and is not one sequence's"
                assert self.device.hashes[page] is None, f"page {page} is written while it can be found"
        write = Write(sequence, start, end, [each.pages[:] for each in table_.groups])
        # as the engine does for a chunk: sequences that start after it may share its pages
        if end < len(sequence.tokens) and random_.random() < 0.5: table_.advance(sequence.tokens[start:end])
        return write

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for each in copies:
            source = self.content[each.where is CopyKind.HOST_TO_DEVICE][each.source]
            self.content[each.where is CopyKind.DEVICE_TO_HOST][each.target] = source
            self.counts[each.where.value] += 1

    def write(self, write: Write) -> None:
        """Writes its tokens. What is before them in the first page must be there."""
        content, size, sequence = self.content[False], self.size, write.sequence
        for group, pages in enumerate(write.pages):
            for page in range(write.start // size, -(-write.end // size)):
                new, old = sequence.content(page, write.end, group), content[pages[page]]
                if (there := write.start - page * size) > 0:
                    assert old[:2] == new[:2], "a page that is continued has other content"
                    assert old[2][:there] == new[2][:there], "a page that is continued has other content"
                content[pages[page]] = new

    def read(self, write: Write) -> None:
        """Reads all that its first token attends to, and its tokens."""
        for group, (pages, window) in enumerate(zip(write.pages, self.pool.windows, strict=True)):
            first = 0 if window is None else max(0, write.start - window + 1) // self.size
            held = all(page >= 0 and self.device.held[page] for page in pages[first:])
            assert held, "a page that is read was given up"
            found = [self.content[False][page] for page in pages[first:]]
            self.compare(found, write.sequence, write.end, group, first)

    def finish(self, write: Write) -> None:
        """Advances over what the batch has written; a sequence may fork, or end."""
        sequence, table_ = write.sequence, write.sequence.table
        table_.advance(sequence.tokens[table_.computed:write.end])
        table_.truncate(write.end)
        table_.prune_window(write.end)
        if write.end < len(sequence.tokens): return
        if sequence.branches: self.fork(sequence)
        if write.end >= sequence.length: self.leave(sequence)

    def edit(self, sequence: Sequence) -> None:
        """Computes the last tokens again, as others."""
        table_, count = sequence.table, sequence.table.computed - self.random.randrange(3 * self.size)
        if table_.is_offloaded or count < 1: return
        if any(each.first_visible_page(count) < each.pruned for each in table_.groups): return
        table_.truncate(count)
        sequence.cut(count)
        sequence.tokens.append(self.random.randrange(50_000))
        self.counts["edits"] += 1

    def fail(self, number: int, copies: Iterable[PageCopy], writes: list[Write]) -> None:
        """The batch fails: its copies and writes leave garbage, and the pool recovers."""
        for each in copies: self.content[each.where is CopyKind.DEVICE_TO_HOST][each.target] = GARBAGE
        for write in writes:
            for pages in write.pages:
                for page in pages[write.start // self.size:]: self.content[False][page] = GARBAGE
        self.pool.recover(number, self.tables)
        self.counts["failed batches"] += 1

    # **** checks ****

    def verify(self, sequence: Sequence) -> None:
        """Asserts that the pages of a sequence hold its tokens."""
        there = self.content[sequence.table.is_offloaded]
        for group, each in enumerate(sequence.table.groups):
            held = [there[page] for page in each.memory()[1]]
            self.compare(held, sequence, each.computed, group, each.pruned)

    def compare(self, found: list[Content], sequence: Sequence, end: int, group: int, first: int) -> None:
        """Asserts that pages hold the tokens of a sequence from page `first` to position `end`."""
        for page, content in enumerate(found[:-(-end // self.size) - first], first):
            right = sequence.content(page, end, group)
            assert content[:2] == right[:2], f"page {page} of a sequence is another's"
            assert content[2][:len(right[2])] == right[2], f"page {page} of a sequence has other content"

    def check(self) -> None:
        """Asserts that pages are held as often as block tables have them, and hold their tokens."""
        tables = self.tables
        self.pool.assert_conserved(tables)
        self.device.count(page for each in tables for page in each.unpruned_pages)
        self.host.count(page for each in tables for page in each.host_pages)
        copies, self.pool.copies = self.pool.copies, []
        self.copy(copies)
        for sequence in (*self.running, *self.preempted): self.verify(sequence)

    def close(self) -> int:
        """Ends all sequences. Returns how many pages are lost."""
        self.check()
        for each in self.tables: each.release()
        self.running.clear()
        self.preempted.clear()
        self.check()
        return self.device.missing_pages + self.host.missing_pages


def run(operations: int, seed: int, progress: float = 0.0) -> dict[str, Any]:
    """At least so many operations, the pools in turns. `progress`: seconds between lines about it. Raises
    AssertionError."""
    begun, cpu, done, lost, checks = time.monotonic(), time.process_time(), 0, 0, 0
    said, counts, by_pool, turn = begun, Counter[str](), defaultdict[str, int](int), 0
    of_turn = min(TURN, -(-operations // len(POOLS)))
    resident = list[float]()
    while done < operations:
        name = list(POOLS)[turn % len(POOLS)]
        load = Load(PagePool(**POOLS[name]), random.Random(f"{seed} {turn}"))
        most, checked = min(operations - done, of_turn), 0
        while (now := load.operations) < most:
            load.step()
            if now - checked < CHECK_EVERY: continue
            load.check()
            checked, checks = now, checks + 1
            if progress and time.monotonic() - said > progress:
                said = time.monotonic()
                rate = (done + now) / (time.process_time() - cpu)
                print(f"operations={done + now} pool={name} per_cpu_s={rate:.0f} lost={lost} "
                      f"rss_mb={resident_bytes() / 1e6:.1f} seconds={said - begun:.0f}", flush=True)
        lost += load.close()
        done += load.operations
        by_pool[name] += load.operations
        for each in (load.counts, load.device.counts, load.host.counts): counts.update(each)
        resident.append(resident_bytes() / 1e6)
        turn += 1
    taken = time.process_time() - cpu
    return {"operations": done, "seed": seed, "lost": lost, "checks": checks, "turns": turn,
            "cpu_seconds": round(taken, 1), "seconds": round(time.monotonic() - begun, 1),
            "per_cpu_s": round(done / taken), "pools": dict(by_pool), "counts": dict(counts.most_common()),
            "resident_mb": {"first_turns": round(max(resident[:len(POOLS)]), 1),
                            "last": round(resident[-1], 1)}}


def main() -> int:
    """Runs them, prints the table and writes the result."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--operations", type=float, default=1e8, help="(default 1e8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--progress", type=float, default=10, metavar="SECONDS", help="between lines (10)")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    found = run(int(args.operations), args.seed, args.progress)
    print(table(("pages", "operations"), [(name, f"{count:,}") for name, count in found["counts"].items()]))
    print(f"{found['operations']:,} operations, {found['lost']} pages lost, {found['cpu_seconds']} s of CPU: "
          f"{found['per_cpu_s']:,} a second; resident MB {found['resident_mb']}")
    if not args.dry: save("page_operations", found)
    return int(found["lost"] > 0)


if __name__ == "__main__": sys.exit(main())
