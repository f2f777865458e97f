"""bench/serving/page_operations.py: a quick slice of its 10⁸ operations, and faults that it must find."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.serving import page_operations
from tinygrad_nv.kvcache.block_table import BlockTable
from tinygrad_nv.kvcache.page_allocator import PageAllocator
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.prefix_hashes import PrefixHashes

DROP, SHARE, KEY = PageAllocator.drop, PageAllocator.share, PrefixHashes.key
TAKE_COPIES = PagePool.take_copies


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
