"""Pages of one memory, the device's or the host's: free, cached, in use.

Protocol. A page is a number; its state is kept in lists indexed by it, so that page operations create no
objects. A page is in one of three states:

    in use    `references` block tables have it
    cached    no references; full, and found by the hash of its tokens. `evictable` holds these pages in LRU
              order
    free      no references and no hash

`take` allocates a free page, else evicts the least recently used cached one. A sequence drops its pages from
last to first, so that its last pages are evicted before the prefix without which they cannot be found.
`written_in` is the number of the batch that wrote a page last (the batch being assembled, for a page just
taken): `PagePool.recover` uses it to discard what a failed batch was to write.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class CopyKind(Enum):
    """Source and target memory of a page copy."""
    DEVICE_TO_DEVICE = "within the device"  # copy on write
    DEVICE_TO_HOST = "to the host"          # offload
    HOST_TO_DEVICE = "from the host"


@dataclass(frozen=True)
class PageCopy:
    """A copy of one page, all layers. `source` and `target` are page numbers of the device or the host."""
    where: CopyKind
    source: int
    target: int


class PageAllocator:
    """`total` pages, all free."""
    __slots__ = ("by_hash", "evictable", "evictions", "free", "hashes", "references", "total", "written_in")

    def __init__(self, total: int) -> None:
        self.total = total
        self.references = [0] * total
        self.written_in = [-1] * total
        self.hashes: list[bytes | None] = [None] * total
        self.by_hash: dict[bytes, int] = {}
        self.free = list(range(total - 1, -1, -1))
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that can be taken: free and cached ones."""
        return len(self.free) + len(self.evictable)

    def take(self, batch: int) -> int:
        """Allocates a page with one reference, to be written by `batch`. One must be available."""
        if self.free: page = self.free.pop()
        else:
            page, _ = self.evictable.popitem(last=False)
            page_hash, self.hashes[page] = self.hashes[page], None
            assert page_hash is not None
            del self.by_hash[page_hash]
            self.evictions += 1
        self.references[page] = 1
        self.written_in[page] = batch
        return page

    def share(self, page: int) -> None:
        """Adds a reference."""
        references = self.references
        if not references[page]: del self.evictable[page]
        references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Removes a reference from each page. Pages without references are cached if they have a hash, in the
        order of eviction, else free."""
        references, hashes, evictable, free = self.references, self.hashes, self.evictable, self.free
        for page in pages:
            references[page] = left = references[page] - 1
            if left: continue
            if hashes[page] is None: free.append(page)
            else: evictable[page] = None

    def register(self, page: int, page_hash: bytes) -> None:
        """Registers the page under `page_hash`, unless it has a hash or another page has this one."""
        if self.hashes[page] is None and page_hash not in self.by_hash:
            self.hashes[page] = page_hash
            self.by_hash[page_hash] = page

    def forget(self, page: int) -> None:
        """Removes the page from the prefix cache."""
        page_hash = self.hashes[page]
        if page_hash is None: return
        self.hashes[page] = None
        del self.by_hash[page_hash]
        if not self.references[page]:
            del self.evictable[page]
            self.free.append(page)
