"""KV cache pages: allocation, sharing, copy on write, prefix caching, eviction."""
from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kvcache.pages_case import A, B, copies, filled
from tinygrad_nv.errors import PageError
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.kvcache.pool import PagePool

# **** sharing ****

def test_full_pages_of_an_equal_beginning_are_shared():
    pool = PagePool(16, 4)
    first = filled(pool, A[:10])
    second = pool.open(A[:10] + B)
    assert (second.pages, second.computed) == (first.pages[:2], 8)
    pool.assert_conserved([first, second])


def test_the_last_token_is_always_computed():
    pool = PagePool(16, 4)
    filled(pool, A[:8])
    assert pool.open(A[:8]).computed == 4
    assert pool.open(A[:9]).computed == 8
    assert pool.open([]).computed == 0


def test_a_page_is_found_by_all_before_it():
    pool = PagePool(16, 4)
    filled(pool, A[:4] + B[:4])
    assert pool.open(A[4:8] + B[:5]).computed == 0
    assert pool.open([*A[:3], 0, *B[:5]]).computed == 0


def test_what_a_salt_keeps_apart():
    pool = PagePool(16, 4)
    filled(pool, A, b"one")
    assert pool.open(A, b"two").computed == pool.open(A).computed == 0
    assert pool.open(A, b"one").computed == 16


def test_two_pools_have_different_hashes():
    """So that hash collisions cannot be prepared from the source code."""
    keys = {filled(PagePool(16, 4), A).prefix.key(0) for _ in range(3)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {16}


def test_equal_pages_at_the_same_time_stay_apart():
    pool = PagePool(16, 4)
    first, second = pool.open(A[:5]), pool.open(A[:5])
    for table in (first, second):
        assert table.reserve(5)
        table.advance(A[:5])
    assert set(first.pages).isdisjoint(second.pages)
    second.release()
    assert pool.stats().cached == 0
    first.release()
    assert pool.stats().cached == 1


def test_without_sharing_nothing_is_kept():
    pool = PagePool(16, 4, sharing=False)
    filled(pool, A).release()
    assert pool.open(A).computed == 0
    assert pool.stats().free == 16


def test_prefixes_are_hashed_once(monkeypatch: pytest.MonkeyPatch):
    from tinygrad_nv.kvcache import prefix_hashes
    calls: list[int] = []
    digest = prefix_hashes.blake2b
    monkeypatch.setattr(prefix_hashes, "blake2b",
                        lambda *args, **more: calls.append(1) or digest(*args, **more))
    pool = PagePool(16, 4)
    table = filled(pool, A)
    assert len(calls) == 1 + 5
    table.release()
    table.share([*A, 1, 2, 3, 4, 5])
    assert table.computed == 20
    assert len(calls) == 1 + 6


# **** eviction ****

def test_free_pages_go_first_then_the_ends_of_what_was_left_longest():
    pool = PagePool(8, 4)
    old, young = filled(pool, A[:12]), filled(pool, B[:12])
    old.release()
    young.release()
    table = pool.open([1])
    assert table.reserve(2 * 4)
    assert pool.stats().evictions == 0
    assert table.reserve(3 * 4)
    assert [pool.open([*tokens[:12], 0]).computed for tokens in (A, B)] == [8, 12]


def test_what_was_used_again_goes_later():
    pool = PagePool(4, 4)
    for tokens in (A[:4], B[:4]): filled(pool, tokens).release()
    pool.open([*A[:4], 0]).release()
    assert pool.open([1]).reserve(12)
    assert pool.open([*A[:4], 0]).computed == 4
    assert pool.open([*B[:4], 0]).computed == 0


def test_all_or_nothing():
    pool = PagePool(4, 4)
    table, other = filled(pool, A[:8]), pool.open(B)
    assert not other.reserve(12)
    assert (other.pages, pool.available) == ([], 2)
    assert other.reserve(8)
    assert table.num_missing_pages(12) == 1
    assert not table.reserve(12)


# **** copy on write ****

def test_a_shared_last_page_is_copied_once():
    pool = PagePool(8, 4)
    first = filled(pool, A[:6])
    second = first.fork()
    assert first.num_missing_pages(7) == second.num_missing_pages(7) == 1
    old = first.pages[1]
    assert second.reserve(7)
    assert copies(pool) == [(CopyKind.DEVICE_TO_DEVICE, old, second.pages[1])]
    assert first.num_missing_pages(7) == 0
    assert first.reserve(7)
    assert copies(pool) == []
    assert first.pages == [second.pages[0], old]


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    pool = PagePool(8, 4)
    first = filled(pool, A[:8])
    second = first.fork()
    assert first.reserve(9)
    assert second.reserve(9)
    assert copies(pool) == []
    pool.assert_conserved([first, second])


def test_writing_ahead_copies_only_what_is_written():
    """Tokens of steps under way are not advanced over yet: `start` says where the next one writes."""
    pool = PagePool(8, 4)
    first = filled(pool, A[:6])
    assert first.reserve(10)
    first.fork()
    assert first.num_missing_pages(10, start=9) == 1
    assert first.num_missing_pages(10) == 2


def test_forks_find_what_each_wrote():
    pool = PagePool(8, 4)
    first = filled(pool, A[:6])
    second = first.fork()
    for table, tail in ((first, [1, 2]), (second, [3, 4])):
        assert table.reserve(8)
        table.advance(tail)
    assert pool.open([*A[:6], 1, 2, 0]).pages == first.pages
    assert pool.open([*A[:6], 3, 4, 0]).pages == second.pages


def test_a_page_that_a_fork_left_full_is_not_found_once_it_is_written():
    pool = PagePool(8, 4)
    first = filled(pool, A[:6])
    assert first.reserve(8)
    second = first.fork()
    first.advance(A[6:8])
    first.release()
    pool.open([*A[:8], 0]).release()
    assert pool.hits == 8
    assert second.reserve(8)
    assert copies(pool) == []
    assert pool.open([*A[:8], 0]).computed == 4


# **** truncate, prune ****

def test_truncated_tokens_are_not_found():
    pool = PagePool(8, 4)
    table = filled(pool, A[:10])
    table.truncate(6)
    assert (table.computed, len(table.pages)) == (6, 2)
    assert pool.open(A[:10]).computed == 4
    table.advance([1, 2])
    assert pool.open([*A[:6], 1, 2, 0]).computed == 8


def test_truncate_gives_back_what_was_reserved():
    pool = PagePool(8, 4)
    table = filled(pool, A[:3])
    assert table.reserve(20)
    table.truncate(3)
    assert (table.computed, pool.available) == (3, 7)


def test_pages_behind_a_window_are_given_back():
    pool = PagePool(8, 4, windows=(6,))
    table = pool.open(A)
    for first in range(0, 20, 4):
        assert table.reserve(first + 4)
        table.advance(A[first:first + 4])
    # tokens 16 to 19, the newest, attend to 11 and later
    assert table.pages[:2] == [-1, -1]
    assert -1 not in table.pages[2:]
    assert pool.available == 8 - 3


def test_a_window_shares_what_its_rows_see():
    pool = PagePool(16, 4, windows=(6,))
    filled(pool, A).release()
    for page in range(2): pool.device.forget(filled(pool, A[:4 * page + 5]).pages[page])
    table = pool.open(A)
    assert table.computed == 16
    assert table.pages[:2] == [-1, -1]
    assert len(table.unpruned_pages) == 2


def test_a_window_finds_nothing_where_one_page_of_it_is_gone():
    pool = PagePool(16, 4, windows=(9,))
    table = filled(pool, A)
    pool.device.forget(table.pages[3])
    assert pool.open([*A, 0]).computed == 12


def test_a_window_needs_no_page_that_ends_right_before_it():
    pool = PagePool(16, 4, windows=(5,))
    table = filled(pool, A)
    pool.device.forget(table.pages[3])
    # the token at position 20 attends to 16 to 20
    assert pool.open([*A, 0]).computed == 20


def test_a_cut_behind_what_was_pruned_is_refused():
    pool = PagePool(8, 4, windows=(4,))
    table = pool.open(A)
    for first in range(0, 20, 4):
        assert table.reserve(first + 4)
        table.advance(A[first:first + 4])
    for tokens in 4, 14:    # the token at position 14 attends to 11 to 14
        words = f"a sequence truncated to {tokens} tokens, whose first 12 were pruned"
        with pytest.raises(PageError, match=words):
            table.truncate(tokens)
    table.truncate(15)
    assert table.computed == 15


# **** numbers ****

def test_stats_tell_what_happened():
    pool = PagePool(4, 4, host_pages=2)
    filled(pool, A[:8]).release()
    table = pool.open(A[:10])
    fork = table.fork()
    assert fork.reserve(13)
    stats = pool.stats()
    assert (stats.total, stats.free, stats.cached, stats.in_use) == (4, 0, 0, 4)
    assert (stats.host_total, stats.host_free, stats.host_cached, stats.host_in_use) == (2, 2, 0, 0)
    assert (stats.hits, stats.queries) == (8, 18)
    assert (stats.copies, stats.evictions, stats.offloads, stats.restores) == (0, 0, 0, 0)
    table.release()
    assert pool.stats() == stats
    assert fork.offload() is False


def test_the_numbers_of_a_batch_grow():
    pool = PagePool(4)
    assert (pool.batch, pool.take_copies(), pool.batch) == (0, (), 1)


def test_moves_are_handed_out_once():
    pool = PagePool(8, 4)
    first = filled(pool, A[:6])
    assert first.fork().reserve(7)
    assert isinstance(pool.take_copies()[0], PageCopy)
    assert pool.take_copies() == ()


@pytest.mark.parametrize("spoil", ["leak", "twice", "lost", "count", "found"])
def test_conservation_is_looked_at(spoil: str):
    pool = PagePool(8, 4)
    table = filled(pool, A[:10])
    pool.assert_conserved([table])
    if spoil == "leak": pool.device.free.pop()
    if spoil == "twice": pool.device.free.append(table.pages[0])
    if spoil == "lost": table.pages.pop()
    if spoil == "count": pool.device.references[table.pages[1]] += 1
    if spoil == "found": pool.device.by_hash.popitem()
    with pytest.raises(AssertionError): pool.assert_conserved([table])


def test_the_bench_counts_what_it_says():
    """And it is fast: a million operations a second on one core, in seconds of the processor."""
    script = Path(__file__).parents[3] / "bench" / "serving" / "kv_pages.py"
    done = subprocess.run([sys.executable, script, "--sequences", "16", "--tokens", "256", "--rounds", "3",
                           "--dry"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in ("allocate", "share", "evict", "append", "fork", "copy on write", "to the host and back"):
        assert f"\n{kind} " in done.stdout
    found = re.search(r"all kinds together: (\d+) thousand operations a second", done.stdout)
    assert found is not None
    assert int(found[1]) >= 200, done.stdout


def test_tokens_and_pages_of_any_number():
    """Sequences of random lengths, one after the other: what is cached never exceeds what there is."""
    choose = random.Random(0)
    pool = PagePool(50, 4)
    for _ in range(200):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 60))]
        table = filled(pool, tokens)
        assert table.computed == len(tokens)
        table.release()
    pool.assert_conserved([])
    assert pool.available == 50
