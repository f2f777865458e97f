"""KV cache pages: offload to the host, and batches that fail; groups of layers, and the pages that a
sequence holds with them."""
from __future__ import annotations

import random

import pytest

from tests.support.kvcache.pages_case import A, B, copies, filled
from tinygrad_nv.kvcache.groups import MAX_GROUPS, CacheGroups, cache_groups
from tinygrad_nv.kvcache.page_allocator import CopyKind
from tinygrad_nv.kvcache.pool import PagePool

# **** host pages ****

def test_what_is_on_the_host_waits_while_the_device_is_full():
    pool = PagePool(4, 4, host_pages=4)
    filled(pool, A[:8]).release()
    tables = [filled(pool, B[:16])]
    tables.append(pool.open(A[:9]))
    assert tables[1].computed == 0
    pool.assert_conserved(tables)


def test_what_is_evicted_goes_to_the_host_and_comes_back():
    pool = PagePool(4, 4, host_pages=4)
    filled(pool, A[:8]).release()
    other = filled(pool, B[:16])
    assert [copy[0] for copy in copies(pool)] == [CopyKind.DEVICE_TO_HOST, CopyKind.DEVICE_TO_HOST]
    other.release()
    table = pool.open(A[:9])
    assert table.computed == 8
    # B's last two pages leave for A's first, before A's arrive there
    where = copies(pool)
    assert [copy[0] for copy in where] == 2 * [CopyKind.DEVICE_TO_HOST, CopyKind.HOST_TO_DEVICE]
    assert [copy[2] for copy in where[1::2]] == table.pages
    assert [copy[1] for copy in where[::2]] == table.pages


def test_a_page_that_came_back_leaves_without_a_copy():
    pool = PagePool(2, 4, host_pages=4)
    filled(pool, A[:8]).release()
    filled(pool, B[:8]).release()
    pool.open(A[:9]).release()
    pool.take_copies()
    filled(pool, A[10:18]).release()
    assert [copy[0] for copy in copies(pool)] == []
    assert pool.open(A[:9]).computed == 8


def test_the_host_forgets_what_left_the_device_first():
    pool = PagePool(2, 4, host_pages=3)
    for tokens in (A, B, [1] * 8): filled(pool, tokens[:4]).release()
    filled(pool, [2] * 4).release()
    first, second = pool.open(A[:5]), pool.open(B[:5])
    assert (first.computed, second.computed) == (4, 4)
    second.release()
    first.release()
    for token in (3, 4, 5, 6): filled(pool, [token] * 4).release()
    assert pool.open(B[:5]).computed == 0
    assert pool.open(A[:5]).computed == 4


def test_a_table_leaves_and_returns():
    pool = PagePool(4, 4, host_pages=4)
    table = filled(pool, A[:10])
    assert table.offload()
    assert (table.pages, table.computed, table.is_offloaded, pool.available) == ([], 10, True, 4)
    pool.assert_conserved([table])
    out = copies(pool)
    filled(pool, B[:16]).release()
    pool.take_copies()
    assert table.restore()
    assert (len(table.pages), table.computed, table.is_offloaded) == (3, 10, False)
    back = [copy for copy in pool.take_copies() if copy.where is CopyKind.HOST_TO_DEVICE]
    assert [(copy.source, copy.target) for copy in back] == \
        [(copy[2], page) for copy, page in zip(out, table.pages, strict=True)]
    pool.assert_conserved([table])


def test_a_table_that_returns_at_once_takes_what_is_still_there():
    pool = PagePool(4, 4, host_pages=4)
    table = filled(pool, A[:10])
    pages = table.pages[:]
    assert table.offload()
    assert table.restore()
    assert table.pages[:2] == pages[:2]
    assert [copy[0] for copy in copies(pool)] == [CopyKind.DEVICE_TO_HOST] * 3 + [CopyKind.HOST_TO_DEVICE]


def test_shared_pages_are_one_page_of_the_host():
    pool = PagePool(8, 4, host_pages=2)
    tables = [filled(pool, A[:8]) for _ in range(2)]
    tables[1].release()
    tables[1].share([*A[:8], 0])
    assert all(table.offload() for table in tables)
    assert pool.stats().host_in_use == 2
    pool.assert_conserved(tables)


def test_too_few_pages_of_the_host_or_to_return_to():
    pool = PagePool(4, 4, host_pages=2)
    table = filled(pool, A[:10])
    assert not table.offload()
    assert (len(table.pages), copies(pool)) == (3, [])
    short = PagePool(3, 4, host_pages=3)
    away = filled(short, A[:10])
    assert away.offload()
    other = short.open(B)
    assert other.reserve(8)
    assert not away.restore()
    other.release()
    assert away.restore()


def test_a_token_that_is_known_while_its_sequence_is_away():
    pool = PagePool(4, 4, host_pages=4)
    table = filled(pool, A[:7])
    assert table.reserve(8)
    assert table.offload()
    table.advance(A[7:8])
    table.release()
    assert pool.open(A[:9]).computed == 8


# **** a batch that fails ****

def test_what_a_failed_batch_was_to_write_is_forgotten():
    pool = PagePool(16, 4)
    early = filled(pool, A[:10])
    pool.take_copies()
    number = pool.batch
    late = filled(pool, B[:10])
    sharing = pool.open(B)
    assert early.reserve(13)
    early.advance(A[10:13])
    pool.take_copies()
    pool.recover(number, [early, late, sharing])
    assert [table.computed for table in (early, late, sharing)] == [8, 0, 0]
    assert pool.open(B).computed == 0
    assert pool.open(A[:13]).computed == 8


def test_pages_that_a_failed_batch_was_to_copy_do_not_count():
    pool = PagePool(4, 4, host_pages=4)
    table = filled(pool, A[:10])
    pool.take_copies()
    number = pool.batch
    assert table.offload()
    pool.take_copies()
    pool.recover(number, [table])
    assert (table.computed, table.is_offloaded) == (0, False)
    assert pool.host.available == 4
    # the device still has what was there before
    assert pool.open(A[:10]).computed == 8


def test_nothing_is_trusted_after_all_is_lost():
    pool = PagePool(8, 4, host_pages=4)
    table = filled(pool, A)
    pool.take_copies()
    pool.recover(0, [table])
    assert (table.computed, pool.stats().free, pool.take_copies()) == (0, 8, ())


GEMMA3_27B = tuple(None if i % 6 == 5 else 1024 for i in range(62))
PAGE = 16


def most_pages(groups: CacheGroups, tokens: int, chunk: int) -> int:
    """The most pages that a sequence holds between its steps, of a prompt in chunks."""
    pool = PagePool(400, PAGE, windows=groups.windows)
    table, most = pool.open([]), 0
    for start in range(0, tokens, chunk):
        new = range(start, min(start + chunk, tokens))
        assert table.reserve(start + len(new))
        most = max(most, pool.stats().in_use)
        table.advance(new)
        table.prune_window(table.computed)
    pool.assert_conserved([table])
    return most


@pytest.mark.parametrize(("windows", "length", "expected", "layers"), [
    ((None,) * 3, 4096, (None,), 3), ((512,) * 4, 4096, (512,), 4),
    # of two windows neither of which is much shorter than the context
    ((4096, None) * 4, 4096, (None,), 8),
    ((128, None) * 12, 4096, (128, None), 12),
    (GEMMA3_27B, 131072, (1024,) * 5 + (None, 1024), 10),
    # one layer of 28: a page of all of them would hold one layer of the group without a window
    ((512,) * 27 + (None,), 4096, (512, 512, 512, 512, 512, 512, 512, None), 4)])
def test_layers_in_groups(windows: tuple[int | None, ...], length: int, expected: tuple[int | None, ...],
                          layers: int):
    made = cache_groups(windows, length, PAGE)
    assert (sorted(made.windows, key=str), made.layers_per_page) == (sorted(expected, key=str), layers)


@pytest.mark.parametrize("seed", range(40))
def test_every_layer_has_a_place_of_its_own(seed: int):
    draw = random.Random(seed)
    windows = tuple(draw.choice([None, None, 64, 100, 1000]) for _ in range(draw.randint(1, 40)))
    made = cache_groups(windows, length := draw.choice([100, 1000, 30000]), PAGE)
    assert len(set(made.places)) == len(windows) == len(made.places)
    assert len(made.windows) <= MAX_GROUPS
    for window, (group, place) in zip(windows, made.places, strict=True):
        own = made.windows[group]
        assert own is None or (window is not None and own >= window)
        assert 0 <= place < made.layers_per_page
    # never more than with all layers in one group
    assert made.layers_per_page * made.num_pages(length, PAGE, 1) <= len(windows) * -(-length // PAGE)


@pytest.mark.parametrize("chunk", [1, 40, 256])
@pytest.mark.parametrize("windows", [(None,), (100,), (100, None), (64, 500, None)])
def test_a_sequence_holds_no_more_pages_than_counted(windows: tuple[int | None, ...], chunk: int):
    groups = CacheGroups(windows, (), 1)
    for tokens in (1, 99, 1024):
        assert most_pages(groups, tokens, chunk) <= groups.num_pages(tokens, PAGE, chunk)
    assert most_pages(groups, 1024, chunk) >= groups.num_pages(1024, PAGE, chunk) - 3 * len(windows)
