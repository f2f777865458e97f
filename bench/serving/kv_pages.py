"""Block operations a second of the page allocator: what the engine's bookkeeping of pages costs.

    python bench/serving/kv_pages.py [--sequences 64] [--tokens 1024] [--rounds 15] [--dry]

Pure Python, no device. An operation is one page taken, shared, given back, evicted, copied on write, moved to
the host or back; of "append" a token of one sequence (reserved and advanced over), of which every sixteenth
takes a page and hashes a full one. The pool has twice the pages that the sequences need. Kinds take turns,
round after round; a rate is the median of its rounds, without Python's collector of garbage; seconds
are those of the processor. The pool's counts are asserted after each round, outside its time.
"""
from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, spread, table
from tinygrad_nv.kvcache.hybrid_table import SequenceTable
from tinygrad_nv.kvcache.pool import PagePool

SIZE = 16
Round = Iterator[tuple[int, float]]     # operations and seconds


class CacheLoad:
    """Sequences of `tokens` tokens each, all different."""

    def __init__(self, sequences: int, tokens: int) -> None:
        self.sequences, self.tokens = sequences, tokens
        self.each_pages = -(-tokens // SIZE)
        self.pages = 2 * sequences * self.each_pages
        self.prompts = [[i] * tokens for i in range(sequences)]

    def pool(self, **more: int) -> PagePool:
        return PagePool(self.pages, SIZE, **more)  # type: ignore[arg-type]

    def fill_tables(self, pool: PagePool) -> list[SequenceTable]:
        """Tables of all sequences, written."""
        made = []
        for prompt in self.prompts:
            made.append(opened := pool.open(prompt))
            assert opened.reserve(self.tokens)
            opened.advance(prompt[opened.computed:])
        return made


def time_call(operations: int, call: Callable[[], object]) -> tuple[int, float]:
    """The call's seconds."""
    begun = time.process_time()
    call()
    return operations, time.process_time() - begun


def every(tables: list[SequenceTable], call: Callable[[SequenceTable], object]) -> Callable[[], None]:
    def run() -> None:
        for one in tables: call(one)
    return run


# **** kinds ****

def allocate(load: CacheLoad) -> Round:
    """Prompts that are not cached, from free pages, hashed."""
    while True:
        pool, tables = load.pool(), list[SequenceTable]()
        def run(pool: PagePool = pool, tables: list[SequenceTable] = tables) -> None:
            tables += load.fill_tables(pool)
        yield time_call(load.sequences * load.each_pages, run)
        pool.assert_conserved(tables)


def share(load: CacheLoad) -> Round:
    """Prompts that are there, hashed and found."""
    pool = load.pool()
    tables = load.fill_tables(pool)
    while True:
        for one in tables: one.release()
        tables.clear()
        yield time_call(load.sequences * ((load.tokens - 1) // SIZE),
                        lambda: tables.extend(map(pool.open, load.prompts)))
        pool.assert_conserved(tables)


def release(load: CacheLoad) -> Round:
    """Pages that stay cached."""
    pool = load.pool()
    while True:
        yield time_call(load.sequences * load.each_pages,
                        every(load.fill_tables(pool), lambda table: table.release()))
        pool.assert_conserved([])


def evict(load: CacheLoad) -> Round:
    """Pages for others, all of which evict a cached one."""
    pool, number = load.pool(), 0
    while True:
        while pool.device.free:
            number += 1
            filler = pool.open([])
            filler.reserve(SIZE * min(load.each_pages, pool.available))
            filler.advance([-number] * (SIZE * len(filler.pages)))
            filler.release()
        tables = [pool.open([]) for _ in load.prompts]
        yield time_call(load.sequences * load.each_pages, every(tables, lambda one: one.reserve(load.tokens)))
        pool.assert_conserved(tables)
        for one in tables: one.release()


def append(load: CacheLoad) -> Round:
    """A token more of each sequence, 64 times."""
    while True:
        pool = load.pool()
        tables = load.fill_tables(pool)
        def steps(tables: list[SequenceTable] = tables) -> None:
            for _ in range(4 * SIZE):
                for one in tables: one.reserve(one.computed + 1)
                for one in tables: one.advance((7,))
        yield time_call(load.sequences * 4 * SIZE, steps)
        pool.assert_conserved(tables)


def fork(load: CacheLoad) -> Round:
    """References more, and less."""
    pool = load.pool()
    tables = load.fill_tables(pool)
    while True:
        def run() -> None:
            for made in [one.fork() for one in tables]: made.release()
        yield time_call(2 * load.sequences * load.each_pages, run)
        pool.assert_conserved(tables)


def copy(load: CacheLoad) -> Round:
    """Copies on write of all pages, as if a fork wrote from its beginning."""
    pool = load.pool()
    tables = load.fill_tables(pool)
    while True:
        forks = [one.fork() for one in tables]
        yield time_call(load.sequences * load.each_pages,
                        every(forks, lambda one: one.reserve(load.tokens, start=0)))
        pool.take_copies()
        pool.assert_conserved([*tables, *forks])
        for one in forks: one.release()


def host(load: CacheLoad) -> Round:
    """Sequences that go to the host and return, all their pages copied."""
    pool = load.pool(host_pages=load.pages, sharing=False)
    tables = load.fill_tables(pool)
    while True:
        def run() -> None:
            for one in tables: one.offload()
            for one in tables: one.restore()
        yield time_call(2 * load.sequences * load.each_pages, run)
        pool.take_copies()
        pool.assert_conserved(tables)


KINDS: dict[str, Callable[[CacheLoad], Round]] = {
    "allocate": allocate, "share": share, "release": release, "evict": evict, "append": append, "fork": fork,
    "copy on write": copy, "to the host and back": host}


def main() -> None:
    """Measures the kinds, and writes the result."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--sequences", type=int, default=64, help="at a time (default 64)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each (default 1024)")
    parser.add_argument("--rounds", type=int, default=15, help="of each kind (default 15)")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    load = CacheLoad(args.sequences, args.tokens)
    kinds = {name: kind(load) for name, kind in KINDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    operations: dict[str, int] = {}
    gc.disable()
    for _ in each(range(args.rounds)):
        for name, rounds in kinds.items():
            operations[name], taken = next(rounds)
            seconds[name].append(taken)
            gc.collect()
    rates = {name: [operations[name] / taken for taken in each_s] for name, each_s in seconds.items()}
    print(table((f"{load.sequences} sequences of {load.tokens} tokens", "thousands a second", "spread"),
                [(name, f"{median(rate) / 1e3:.0f}", spread([one / 1e3 for one in rate]))
                 for name, rate in rates.items()]))
    whole = sum(operations.values()) / sum(map(median, seconds.values()))
    print(f"all kinds together: {whole / 1e3:.0f} thousand operations a second")
    record = {"sequences": load.sequences, "tokens": load.tokens, "page_size": SIZE, "pages": load.pages,
              "operations": operations, "seconds": seconds, "all_per_s": whole,
              "per_s": {name: median(rate) for name, rate in rates.items()}}
    if not args.dry: save("kv_pages", record)


if __name__ == "__main__": main()
