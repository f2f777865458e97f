"""The page allocator under anything an engine may do to it, in any order, steps under way and failing.

`pages_case.Drive` is the model: it keeps what every page holds, independently of the pool. Hypothesis looks
for short sequences of operations that lose something; a fast random drive goes on for long. Bugs that are
planted in the allocator must be found."""
from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pages_case import POOLS, Drive, driven

from tinygrad_nv.kvcache import offload
from tinygrad_nv.kvcache.pages import Pages, Where
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.prefix import Prefix
from tinygrad_nv.kvcache.table import Table

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

def fork_without_references(table: Table) -> Table:
    made = Table(table.pool, table.prefix.copy())
    made.pages, made.computed, made.pruned = table.pages[:], table.computed, table.pruned
    made.host_pages = table.host_pages[:]
    return made


def share_leaves_idle(pages: Pages, page: int) -> None:
    pages.references[page] += 1


def drop_pages_once(pages: Pages, given: Any) -> None:
    """Shared pages go with their first reference."""
    for page in given:
        pages.references[page] = 0
        if pages.keys[page] is None: pages.free.append(page)
        else: pages.idle[page] = None


def drop_but_the_last(pages: Pages, given: Any) -> None:
    """A leak of one page of each sequence."""
    DROP(pages, list(given)[:-1])


def key_of_the_page_alone(prefix: Prefix, page: int) -> bytes:
    tokens = prefix.tokens[page * prefix.size:(page + 1) * prefix.size]
    return blake2b(prefix.first + tokens.tobytes(), digest_size=16).digest()


def key_without_salt(prefix: Prefix, page: int) -> bytes:
    return blake2b(prefix.tokens[:(page + 1) * prefix.size].tobytes(), digest_size=16).digest()


def key_short_of_a_token(prefix: Prefix, page: int) -> bytes:
    tokens = array("i", [page, *prefix.tokens[:(page + 1) * prefix.size - 1]])
    return blake2b(prefix.first + tokens.tobytes(), digest_size=16).digest()


def moves_in_reverse(pool: PagePool) -> Any: return MOVES(pool)[::-1]


def prune_one_page_more(table: Table, before: int) -> None:
    PRUNE(table, before + table.pool.page_size if before > 0 else before)


def prune_when_computed(table: Table, tokens: Any) -> None:
    """Gives back what the batch being assembled still reads."""
    ADVANCE(table, tokens)
    if table.pool.window is not None and not table.away: table.prune(table.computed - table.pool.window + 1)


def own_without_copy(table: Table, i: int) -> None:
    if table.pool.device.references[table.pages[i]] == 1: OWN(table, i)


def recover_nothing(pool: PagePool, batch: int, tables: Any) -> None: pool.moves.clear()


def recover_but_found(pool: PagePool, batch: int, tables: Any) -> None:
    """Tables are cut, and what the failed batch was to write is still found."""
    pool.moves.clear()
    for table in tables: table.cut(batch)


def recover_from_the_next(pool: PagePool, batch: int, tables: Any) -> None: RECOVER(pool, batch + 1, tables)


def out_without_move(pool: PagePool, page: int) -> int:
    made = OUT(pool, page)
    if pool.moves[-1].source % 3 == 0: pool.moves.pop()
    return made


def back_of_a_free_page(pool: PagePool, page: int) -> int:
    """Copies it back after the page of the host went to another."""
    made = BACK(pool, page)
    pool.moves.insert(0, pool.moves.pop())
    return made


def restore_drops_before(pool: PagePool, pages: list[int]) -> list[int] | None:
    """Pages of the host that are given back before they were copied."""
    pool.host.drop(reversed(pages))
    for page in pages: pool.host.idle.pop(page, None)
    return RESTORE(pool, pages)


def move_backwards(pool: PagePool, where: Where, source: int, target: int) -> None:
    if where is Where.WITHIN: source, target = target, source
    MOVE(pool, where, source, target)


DROP, MOVES, PRUNE, ADVANCE, OWN = Pages.drop, PagePool.take_moves, Table.prune, Table.advance, Table._own
RECOVER, MOVE = PagePool.recover, PagePool.move
OUT, BACK, RESTORE = offload.out, offload.back, offload.restore
BUGS: list[tuple[object, str, Callable[..., Any], str]] = [
    (Table, "fork", fork_without_references, "small"), (Pages, "share", share_leaves_idle, "small"),
    (Pages, "drop", drop_pages_once, "small"), (Pages, "drop", drop_but_the_last, "small"),
    (Prefix, "key", key_of_the_page_alone, "small"), (Prefix, "key", key_without_salt, "small"),
    (Prefix, "key", key_short_of_a_token, "small"), (PagePool, "take_moves", moves_in_reverse, "host"),
    (Table, "prune", prune_one_page_more, "window"), (Table, "prune", prune_one_page_more, "small"),
    (Table, "advance", prune_when_computed, "window"), (Table, "_own", own_without_copy, "small"),
    (PagePool, "recover", recover_nothing, "small"), (PagePool, "recover", recover_but_found, "small"),
    (PagePool, "recover", recover_from_the_next, "small"), (offload, "out", out_without_move, "host"),
    (offload, "back", back_of_a_free_page, "host"), (offload, "restore", restore_drops_before, "host"),
    (PagePool, "move", move_backwards, "small")]


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
