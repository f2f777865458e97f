"""The page allocator under anything an engine may do to it, in any order, steps under way and failing.
bench/serving/page_operations.py: a quick slice of its 10⁸ operations, and faults that it must find.

`pages_case.Drive` is the model: it keeps what every page holds, independently of the pool. Hypothesis looks
for short sequences of operations that lose something; a fast random drive goes on for long. Bugs that are
planted in the allocator must be found.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.serving import page_operations
from tests.support.kvcache.pages_case import POOLS, Drive, driven
from tinygrad_nv.kvcache import offload
from tinygrad_nv.kvcache.block_table import BlockTable
from tinygrad_nv.kvcache.hybrid_table import HybridTable
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageAllocator
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.prefix_hashes import PrefixHashes

NUMBERS = st.integers(0, 63)


class Machine(RuleBasedStateMachine):
    """Operations of `Drive` as rules."""

    @initialize(name=st.sampled_from(sorted(POOLS)))
    def begin(self, name: str) -> None:
        self.drive = Drive(PagePool(**POOLS[name]))  # type: ignore[arg-type]

    @rule(a=NUMBERS, b=NUMBERS, c=NUMBERS)
    def opened(self, a: int, b: int, c: int) -> None: self.drive.open(a, b, c)

    @rule(a=NUMBERS, b=NUMBERS, c=NUMBERS)
    def launched(self, a: int, b: int, c: int) -> None: self.drive.step(a, b, c)

    @precondition(lambda self: self.drive.steps)
    @rule()
    def completed(self) -> None: self.drive.complete(0, 0, 0)

    @precondition(lambda self: self.drive.steps)
    @rule(a=NUMBERS, c=NUMBERS)
    def crashed(self, a: int, c: int) -> None: self.drive.crash(a, 0, c)

    @precondition(lambda self: self.drive.sequences)
    @rule(which=st.sampled_from(["fork", "abort", "preempt", "offload", "restore", "truncate", "prune"]),
          a=NUMBERS, b=NUMBERS, c=NUMBERS)
    def changed(self, which: str, a: int, b: int, c: int) -> None: getattr(self.drive, which)(a, b, c)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "drive"): self.drive.check()

    def teardown(self) -> None:
        if hasattr(self, "drive"): self.drive.close()


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POOLS)
def test_a_random_drive_loses_nothing(name: str):
    drive = driven(name, 6000, every=20)
    assert min(drive.counts.values()) > 10, drive.counts


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_a_long_drive_loses_nothing(name: str):
    """1.2 · 10⁶ operations over all pools, besides those that there was nothing for."""
    done = sum(sum(driven(name, 10_000, seed=1000 + seed, every=10).counts.values()) for seed in range(36))
    assert done >= 200_000


# **** bugs that must be found ****

def fork_without_references(table: BlockTable) -> BlockTable:
    made = BlockTable(table.pool, table.prefix.copy())
    made.pages, made.computed, made.pruned = table.pages[:], table.computed, table.pruned
    made.host_pages = table.host_pages[:]
    return made


def share_leaves_idle(pages: PageAllocator, page: int) -> None:
    pages.references[page] += 1


def drop_pages_once(pages: PageAllocator, given: Any) -> None:
    """Shared pages go with their first reference."""
    for page in given:
        pages.references[page] = 0
        if pages.hashes[page] is None: pages.free.append(page)
        else: pages.evictable[page] = None


def drop_but_the_last(pages: PageAllocator, given: Any) -> None:
    """A leak of one page of each sequence."""
    DROP(pages, list(given)[:-1])


def key_of_the_page_alone(prefix: PrefixHashes, page: int) -> bytes:
    tokens = prefix.tokens[page * prefix.size:(page + 1) * prefix.size]
    return blake2b(prefix.first + tokens.tobytes(), digest_size=16).digest()


def key_without_salt(prefix: PrefixHashes, page: int) -> bytes:
    return blake2b(prefix.tokens[:(page + 1) * prefix.size].tobytes(), digest_size=16).digest()


def key_short_of_a_token(prefix: PrefixHashes, page: int) -> bytes:
    tokens = array("i", [page, *prefix.tokens[:(page + 1) * prefix.size - 1]])
    return blake2b(prefix.first + tokens.tobytes(), digest_size=16).digest()


def moves_in_reverse(pool: PagePool) -> Any: return TAKE_COPIES(pool)[::-1]


def prune_one_page_more(table: BlockTable, before: int) -> None:
    PRUNE(table, before + table.pool.page_size if before > 0 else before)


def prune_when_computed(table: BlockTable, tokens: Any) -> None:
    """Gives back what the batch being assembled still reads."""
    ADVANCE(table, tokens)
    window = table.window
    if window is not None and not table.is_offloaded: table.prune(table.computed - window + 1)


def pages_of_any_group(table: BlockTable, pool: PagePool, prefix: PrefixHashes, group: int = 0) -> None:
    INIT(table, pool, prefix, group)
    table.suffix = b""


def rollback_each_alone(table: HybridTable, batch: int) -> None:
    for each in table.groups: each.rollback(batch)


def own_without_copy(table: BlockTable, i: int) -> None:
    if table.pool.device.references[table.pages[i]] == 1: MAKE_WRITABLE(table, i)


def recover_nothing(pool: PagePool, batch: int, tables: Any) -> None: pool.copies.clear()


def recover_but_found(pool: PagePool, batch: int, tables: Any) -> None:
    """Tables are cut, and what the failed batch was to write is still found."""
    pool.copies.clear()
    for table in tables: table.rollback(batch)


def recover_from_the_next(pool: PagePool, batch: int, tables: Any) -> None: RECOVER(pool, batch + 1, tables)


def to_host_without_copy(pool: PagePool, page: int) -> int:
    made = TO_HOST(pool, page)
    if pool.copies[-1].source % 3 == 0: pool.copies.pop()
    return made


def to_device_from_a_free_page(pool: PagePool, page: int) -> int:
    """Copies it back after the page of the host went to another."""
    made = TO_DEVICE(pool, page)
    pool.copies.insert(0, pool.copies.pop())
    return made


def restore_drops_before(pool: PagePool, pages: list[int]) -> list[int] | None:
    """Pages of the host that are given back before they were copied."""
    pool.host.drop(reversed(pages))
    for page in pages: pool.host.evictable.pop(page, None)
    return RESTORE(pool, pages)


def move_backwards(pool: PagePool, where: CopyKind, source: int, target: int) -> None:
    if where is CopyKind.DEVICE_TO_DEVICE: source, target = target, source
    COPY(pool, where, source, target)


DROP, PRUNE, ADVANCE = PageAllocator.drop, BlockTable.prune, BlockTable.advance
MAKE_WRITABLE = BlockTable._make_writable
TAKE_COPIES, RECOVER, COPY = PagePool.take_copies, PagePool.recover, PagePool.copy
TO_HOST, TO_DEVICE, RESTORE = offload.copy_to_host, offload.copy_to_device, offload.restore
INIT = BlockTable.__init__
BUGS: list[tuple[object, str, Callable[..., Any], str]] = [
    (BlockTable, "fork", fork_without_references, "small"),
    (PageAllocator, "share", share_leaves_idle, "small"),
    (PageAllocator, "drop", drop_pages_once, "small"), (PageAllocator, "drop", drop_but_the_last, "small"),
    (PrefixHashes, "key", key_of_the_page_alone, "small"), (PrefixHashes, "key", key_without_salt, "small"),
    (PrefixHashes, "key", key_short_of_a_token, "small"), (PagePool, "take_copies", moves_in_reverse, "host"),
    (BlockTable, "prune", prune_one_page_more, "window"), (BlockTable, "prune", prune_one_page_more, "small"),
    (BlockTable, "advance", prune_when_computed, "window"),
    (BlockTable, "prune", prune_one_page_more, "hybrid"),
    (BlockTable, "advance", prune_when_computed, "hybrid"),
    (BlockTable, "__init__", pages_of_any_group, "hybrid"),
    (HybridTable, "rollback", rollback_each_alone, "hybrid"),
    (BlockTable, "_make_writable", own_without_copy, "small"),
    (PagePool, "recover", recover_nothing, "small"), (PagePool, "recover", recover_but_found, "small"),
    (PagePool, "recover", recover_from_the_next, "small"),
    (offload, "copy_to_host", to_host_without_copy, "host"),
    (offload, "copy_to_device", to_device_from_a_free_page, "host"),
    (offload, "restore", restore_drops_before, "host"),
    (PagePool, "copy", move_backwards, "small")]


def long(pool: str, conserved: bool) -> None:
    """A drive of several beginnings."""
    for seed in range(8): driven(pool, 3000, seed=seed, conserved=conserved)


@pytest.mark.parametrize("conserved", [True, False], ids=["by all", "by what pages hold"])
@pytest.mark.parametrize(("place", "name", "bug", "pool"), BUGS, ids=[bug.__name__ for _, _, bug, _ in BUGS])
def test_a_bug_is_found(place: object, name: str, bug: Callable[..., Any], pool: str, conserved: bool,
                        monkeypatch: pytest.MonkeyPatch):
    """Also without a look at the counts."""
    monkeypatch.setattr(place, name, bug)
    with pytest.raises((AssertionError, KeyError, IndexError)): long(pool, conserved)


SHARE, KEY = PageAllocator.share, PrefixHashes.key
def test_operations_lose_no_page():
    found = page_operations.run(200_000, seed=3)
    assert found["lost"] == 0
    assert found["operations"] >= 200_000
    assert {*found["pools"]} == {*page_operations.POOLS}
    counts = found["counts"]
    assert min(counts[name] for name in (
        "taken", "shared", "dropped", "evicted", "missed", "hits", "forks", "edits", "preemptions",
        "offloads", "failed batches", "within the device", "to the host", "from the host")) >= 1, counts


def drop_all_but_one(pages: PageAllocator, dropped: Any) -> None: DROP(pages, list(dropped)[:-1])


def free_twice(pages: PageAllocator, dropped: Any) -> None:
    given = list(dropped)
    DROP(pages, given)
    pages.free += pages.free[-1:] if given else []


def share_without_a_reference(pages: PageAllocator, page: int) -> None:
    if not pages.references[page]: SHARE(pages, page)


def release_without_drop(table: BlockTable) -> None: table.clear()


def key_of_the_page_before(prefix: PrefixHashes, page: int) -> bytes: return KEY(prefix, max(0, page - 1))


def no_copies(pool: PagePool) -> tuple[Any, ...]:
    TAKE_COPIES(pool)
    return ()


@pytest.mark.parametrize(("place", "name", "fault", "words"), [
    (PageAllocator, "drop", drop_all_but_one, r"used \+ .* free \+ .* cached ≠"),
    (PageAllocator, "drop", free_twice, r"used \+ .* free \+ .* cached ≠"),
    (PageAllocator, "share", share_without_a_reference, "is not one sequence's"),
    (BlockTable, "release", release_without_drop, "≠|in 0 tables"),
    (PrefixHashes, "key", key_of_the_page_before, "other content|another's"),
    (PagePool, "take_copies", no_copies, "other content")])
def test_a_fault_is_found(place: Any, name: str, fault: Callable[..., Any], words: str,
                          monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(place, name, fault)
    monkeypatch.setattr(page_operations, "CHECK_EVERY", 1000)
    with pytest.raises(AssertionError, match=words): page_operations.run(200_000, seed=3)
