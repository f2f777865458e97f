"""The page pool of a device and its host: block tables, prefix caching, pending copies.

Protocol. `open` returns a `BlockTable` (block_table.py) for a sequence, or a `HybridTable` (hybrid_table.py)
if there are several groups of layers; all groups take pages of this pool. Block tables take, share and free
pages; none of this touches a device. Required copies are collected as `PageCopy`s (page_allocator.py) for the
next batch, in order: `take_copies`. Batches run in the order of their `take_copies` calls. So a page may be
reused as soon as the last batch that needs it is launched. A page may be shared (`BlockTable.advance`) as
soon as the batch that writes it is launched, or is certain to be the next one. Sequences of the same batch
may share it, too: in each layer a batch writes all keys and values before any token attends to them.

Two sequences that fill equal pages at the same time keep one page each. The second page is not found by its
hash, and is freed with its sequence. So no block table changes under a running step; later sequences share
the first page.

With host pages, an evicted page is copied to the host first, and `open` copies it back when its hash is
looked up again. Host pages are evicted in the same order.

When a batch fails, `recover(number, tables)` discards everything that it, or a later batch, was to write.
`batch` is the number of the batch being assembled.
"""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinygrad_nv.errors import PageError
from tinygrad_nv.kvcache.block_table import BlockTable
from tinygrad_nv.kvcache.hybrid_table import HybridTable, SequenceTable
from tinygrad_nv.kvcache.offload import TieredPages
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageAllocator, PageCopy
from tinygrad_nv.kvcache.prefix_hashes import Extra, PrefixHashes, root
from tinygrad_nv.kvcache.state_table import StatePages


@dataclass(frozen=True)
class PagePoolStats:
    """Page counts: total = free + cached + in_use, and the same for the host. Of `queries` tokens looked up
    in the prefix cache, `hits` were found. `evictions`: cached pages reused; `copies`: pages copied on write;
    `offloads` and `restores`: pages copied to the host and back."""
    total: int
    free: int
    cached: int
    in_use: int
    host_total: int
    host_free: int
    host_cached: int
    host_in_use: int
    hits: int
    queries: int
    evictions: int
    copies: int
    offloads: int
    restores: int


class PagePool(TieredPages):
    """`pages` pages of `page_size` tokens, and `host_pages` on the host. `sharing`: later sequences with the
    same prefix share full pages (prefix caching). `windows`: of each group of layers (groups.py) how many
    keys a token attends to, itself included; pages behind the window are freed. None: all keys. `states` are
    the pages of states of a model that has such. Raises `PageError`."""

    def __init__(self, pages: int, page_size: int = 16, *, host_pages: int = 0, sharing: bool = True,
                 windows: tuple[int | None, ...] = (None,), states: StatePages | None = None) -> None:
        for name, number, minimum in (("pages", pages, 1), ("page_size", page_size, 1),
                                      ("host_pages", host_pages, 0),
                                      *(("window", each, 1) for each in windows if each is not None)):
            if type(number) is not int or number < minimum:
                raise PageError(f"a pool with {name}={number!r}", f"a whole number, at least {minimum}")
        super().__init__(pages, page_size, host_pages, sharing, windows)
        self._secret, self.states = os.urandom(16), states

    def open(self, tokens: Sequence[int], salt: bytes = b"", extra: Extra | None = None) -> SequenceTable:
        """A block table that shares the longest cached prefix of `tokens`, without the last token, which must
        be computed for its logits. Only pages written with the same `salt` are shared, and of these with the
        same `extra` (prefix_hashes.py)."""
        prefix = PrefixHashes(root(self._secret, salt), self.page_size, extra)
        single = len(self.windows) == 1 and self.states is None
        table: SequenceTable = BlockTable(self, prefix) if single else HybridTable(self, prefix, self.states)
        if self.sharing: table.share(tokens)
        return table

    def take_copies(self) -> tuple[PageCopy, ...]:
        """The copies that the batch being assembled must do, in order, before it computes. Starts the next
        batch."""
        copies = tuple(self.copies)
        self.copies.clear()
        self.batch += 1
        if self.states is not None: self.states.next_batch(self.batch)
        return copies

    def recover(self, batch: int, tables: Iterable[SequenceTable]) -> None:
        """Discards the writes of batch `batch` and all after it; none may be running. Cached pages that they
        were to write are forgotten, and each of `tables`, which must be all, is rolled back to whole pages
        written before: `computed` is then where to continue. `batch` 0 discards all pages."""
        self.copies.clear()
        for pages in (self.device, self.host):
            for page in list(pages.by_hash.values()):
                if pages.written_in[page] >= batch: pages.forget(page)
        if self.states is not None: self.states.forget(batch)
        for table in tables: table.rollback(batch)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. Pages in use stay so, and are not found by others."""
        for pages in (self.device, self.host):
            for page in list(pages.by_hash.values()): pages.forget(page)
        if self.states is not None: self.states.forget(0)

    # **** statistics and checks ****

    def stats(self) -> PagePoolStats:
        """Current page counts, and totals."""
        def states(pages: PageAllocator) -> tuple[int, int, int, int]:
            free, cached = len(pages.free), len(pages.evictable)
            return pages.total, free, cached, pages.total - free - cached
        return PagePoolStats(*states(self.device), *states(self.host), self.hits, self.queries,
                         self.device.evictions, *(self.num_copies[where] for where in CopyKind))

    def assert_conserved(self, tables: Iterable[SequenceTable]) -> None:
        """Asserts that each page is free, cached or in use, and that its references are those of `tables`,
        which must be all."""
        tables_list = list(tables)
        for name, pages, page_lists in (("device", self.device,
                                         [table.unpruned_pages for table in tables_list]),
                                        ("host", self.host, [table.host_pages for table in tables_list])):
            counted = Counter(page for each in page_lists for page in each)
            free, idle = set(pages.free), set(pages.evictable)
            assert len(free) == len(pages.free), f"{name}: a page is free twice"
            assert free.isdisjoint(idle), f"{name}: pages {free & set(idle)} are free and cached"
            assert counted.keys().isdisjoint(free | idle), f"{name}: a page in use is free or cached"
            assert len(free) + len(idle) + len(counted) == pages.total, \
                f"{name}: {len(free)} free + {len(idle)} cached + {len(counted)} in use ≠ {pages.total}"
            for page, count in enumerate(pages.references):
                assert count == counted[page], f"{name} page {page}: {count} references, {counted[page]} held"
            for page, key in enumerate(pages.hashes):
                assert key is None or pages.by_hash.get(key) == page, f"{name} page {page}: found elsewhere"
                assert key is None or page not in free, f"{name} page {page}: free, and found"
                assert key is not None or page not in idle, f"{name} page {page}: cached without a hash"
            assert len(pages.by_hash) == sum(key is not None for key in pages.hashes), f"{name}: stale hashes"
        if self.states is not None: self.states.assert_conserved(
            [table.states for table in tables_list if isinstance(table, HybridTable)])
