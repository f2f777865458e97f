"""Offload to host pages, and back.

Protocol. Host pages are counted, shared and found as the device's are. A full page may be in both memories:
it is never copied twice, and a page that came back from the host needs no copy to be offloaded again. Copies
are `PageCopy`s of the next batch, in request order. So a source page may be reused as soon as its copy is
queued: its next writer is queued behind the copy.

    offload_evicted     copies a page that is being evicted to the host, if a host page is available
    find_pages          cached pages by their hashes, from either memory, each with one more reference
    offload, restore    a whole block table, all or nothing
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinygrad_nv.engine.scheduling.scheduler_output import CopyKind
from tinygrad_nv.kvcache.page_allocator import PageAllocator

if TYPE_CHECKING:
    from tinygrad_nv.kvcache.block_table import BlockTable
    from tinygrad_nv.kvcache.pool import PagePool


def offload_evicted(pool: PagePool, page: int) -> None:
    """Copies a cached device page that is being evicted to the host's cache, as the most recently used page,
    if a host page is available."""
    host, key = pool.host, pool.device.hashes[page]
    assert key is not None
    if (on_other := host.by_hash.get(key)) is not None:
        if on_other in host.evictable: host.evictable.move_to_end(on_other)
    elif host.available: host.drop((copy_to_host(pool, page),))


def copy_to_host(pool: PagePool, page: int) -> int:
    """Copies a device page to a new host page, which gets its hash and one reference."""
    key, taken = pool.device.hashes[page], pool.host.take(pool.batch)
    pool.copy(CopyKind.DEVICE_TO_HOST, page, taken)
    if key is not None: pool.host.register(taken, key)
    return taken


def copy_to_device(pool: PagePool, page: int) -> int:
    """Copies a host page, which must have a reference, to a new device page, which gets its hash and one
    reference."""
    key, taken = pool.host.hashes[page], pool.take()
    pool.copy(CopyKind.HOST_TO_DEVICE, page, taken)
    if key is not None: pool.device.register(taken, key)
    return taken


def find_pages(pool: PagePool, keys: Sequence[bytes]) -> list[int]:
    """Device pages with these hashes, each with one more reference; pages that only the host has are copied.
    Stops at the first hash that is not cached, or when the device is out of pages."""
    taken: list[int] = []
    for key in keys:
        if (page := pool.device.by_hash.get(key)) is not None: pool.device.share(page)
        elif (on_other := pool.host.by_hash.get(key)) is None or not pool.available: break
        else:
            pool.host.share(on_other)
            page = copy_to_device(pool, on_other)
            pool.host.drop((on_other,))
        taken.append(page)
    return taken


def offload(table: BlockTable) -> bool:
    """See `BlockTable.offload`."""
    pool, pages = table.pool, table.held_pages
    if not pages: return True
    on_other = _copies_in(pool.device, pages, pool.host)
    if on_other is None: return False
    table.host_pages = [copy_to_host(pool, page) if copy is None else copy
                        for page, copy in zip(pages, on_other, strict=True)]
    pool.device.drop(reversed(pages))
    table.pages = []
    return True


def restore(table: BlockTable) -> bool:
    """See `BlockTable.restore`."""
    pool, pages = table.pool, table.host_pages
    on_other = _copies_in(pool.host, pages, pool.device)
    if on_other is None: return False
    taken = [copy_to_device(pool, page) if copy is None else copy
             for page, copy in zip(pages, on_other, strict=True)]
    pool.host.drop(reversed(pages))
    table.pages, table.host_pages = [-1] * table.pruned + taken, []
    return True


def _copies_in(here: PageAllocator, pages: Sequence[int], other: PageAllocator) -> list[int | None] | None:
    """For each page its copy in the other memory, with one more reference, or None. Returns None if the rest
    do not fit there."""
    keys = [here.hashes[page] for page in pages]
    on_other = [None if key is None else other.by_hash.get(key) for key in keys]
    needed = sum(copy is None or not other.references[copy] for copy in on_other)
    if needed > other.available: return None
    for copy in on_other:
        if copy is not None: other.share(copy)
    return on_other
