"""The pages of a device and its host, and offload between them.

Protocol. `TieredPages` is the state that the page pool shares with its block tables. Host pages are counted,
shared and found as the device's are. A full page may be in both memories: it is never copied twice, and a
page that came back from the host needs no copy to be offloaded again. Copies are `PageCopy`s of the next
batch, in request order. So a source page may be reused as soon as its copy is queued: its next writer is
queued behind the copy.

    offload_evicted     copies a page that is being evicted to the host, if a host page is available
    find_pages          cached pages by their hashes, from either memory, each with one more reference
    offload, restore    the pages of a block table, all or nothing
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.kvcache.page_allocator import CopyKind, PageAllocator, PageCopy


class TieredPages:
    """`pages` device pages of `page_size` tokens, `host_pages` host pages, and the copies that the next batch
    must do. `sharing` and `windows` as in `PagePool`."""

    def __init__(self, pages: int, page_size: int, host_pages: int, sharing: bool,
                 windows: tuple[int | None, ...]) -> None:
        self.page_size, self.sharing, self.windows = page_size, sharing, windows
        self.device, self.host = PageAllocator(pages), PageAllocator(host_pages)
        self.batch = 0
        self.copies: list[PageCopy] = []
        self.hits = self.queries = 0
        self.num_copies = dict.fromkeys(CopyKind, 0)

    @property
    def available(self) -> int:
        """Device pages that block tables can take: free and cached ones."""
        return len(self.device.free) + len(self.device.evictable)

    def take(self) -> int:
        """Allocates a device page with one reference. One must be available."""
        device = self.device
        if self.host.total and not device.free: offload_evicted(self, next(iter(device.evictable)))
        return device.take(self.batch)

    def copy(self, where: CopyKind, source: int, target: int) -> None:
        """Queues a page copy ahead of the next batch."""
        self.copies.append(PageCopy(where, source, target))
        self.num_copies[where] += 1


def offload_evicted(pool: TieredPages, page: int) -> None:
    """Copies a cached device page that is being evicted to the host's cache, as the most recently used page,
    if a host page is available."""
    host, key = pool.host, pool.device.hashes[page]
    assert key is not None
    if (on_other := host.by_hash.get(key)) is not None:
        if on_other in host.evictable: host.evictable.move_to_end(on_other)
    elif host.available: host.drop((copy_to_host(pool, page),))


def copy_to_host(pool: TieredPages, page: int) -> int:
    """Copies a device page to a new host page, which gets its hash and one reference."""
    key, taken = pool.device.hashes[page], pool.host.take(pool.batch)
    pool.copy(CopyKind.DEVICE_TO_HOST, page, taken)
    if key is not None: pool.host.register(taken, key)
    return taken


def copy_to_device(pool: TieredPages, page: int) -> int:
    """Copies a host page, which must have a reference, to a new device page, which gets its hash and one
    reference."""
    key, taken = pool.host.hashes[page], pool.take()
    pool.copy(CopyKind.HOST_TO_DEVICE, page, taken)
    if key is not None: pool.device.register(taken, key)
    return taken


def find_pages(pool: TieredPages, keys: Sequence[bytes]) -> list[int]:
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


def offload(pool: TieredPages, pages: Sequence[int]) -> list[int] | None:
    """Moves device pages to the host. Returns their host pages, or None, with nothing changed, if the host is
    out of pages."""
    on_other = _copies_in(pool.device, pages, pool.host)
    if on_other is None: return None
    taken = [copy_to_host(pool, page) if copy is None else copy
             for page, copy in zip(pages, on_other, strict=True)]
    pool.device.drop(reversed(pages))
    return taken


def restore(pool: TieredPages, pages: Sequence[int]) -> list[int] | None:
    """Moves host pages back to the device. Returns their device pages, or None, with nothing changed, if the
    device is out of pages."""
    on_other = _copies_in(pool.host, pages, pool.device)
    if on_other is None: return None
    taken = [copy_to_device(pool, page) if copy is None else copy
             for page, copy in zip(pages, on_other, strict=True)]
    pool.host.drop(reversed(pages))
    return taken


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
