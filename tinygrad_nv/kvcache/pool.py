"""The pages of a device, and of the host beside it: what sequences have, share and leave behind.

Protocol. `open` gives a `Table` (table.py) for a sequence. Tables take, share and give back pages; nothing of
it happens on a device. What must be copied there is collected as `Move`s (pages.py), which the next
batch carries, in order: `take_moves`. Batches run in the order in which their moves were taken, each after
all before it, so a page may be given on as soon as the last batch that needs it was launched, and a page's
tokens may be found by others (`Table.advance`) as soon as the batch that writes them is certain to be the
next one or was launched. Others of the same batch may find them too: a batch appends the keys and values of
all its rows, layer by layer, before any row looks at them.

Two sequences that fill equal pages at the same time keep one each; the second is found by nobody, and is free
when its sequence is done. No block table changes under a step that runs, and the next sequence shares.

With pages of the host, a page that is evicted is copied there first, and `open` brings it back when it is
asked for again. Host pages are evicted in the same order.

A batch that fails: `batch` is the number of the one being assembled. `recover(number, tables)` makes nothing
count that it, or one after it, was to write.
"""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinygrad_nv.errors import PageError
from tinygrad_nv.kvcache.offload import Memories
from tinygrad_nv.kvcache.pages import Move, Pages, Where
from tinygrad_nv.kvcache.prefix import Prefix, root
from tinygrad_nv.kvcache.table import Table


@dataclass(frozen=True)
class PoolStats:
    """Pages by state: total = free + cached + in_use, and so for the host's. Of `queries` tokens that
    sequences were opened with, `hits` were there. `evictions` count cached pages that were given to others,
    `copies` pages copied on write, `offloads` and `restores` pages copied to the host and back."""
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


class PagePool(Memories):
    """`pages` pages of `page_size` tokens, and `host_pages` of the host. `sharing`: full pages are found by
    later sequences with the same beginning. `window`: no row sees keys further back than so many, its own
    counted, so pages wholly behind it are given back. Raises `PageError`."""

    def __init__(self, pages: int, page_size: int = 16, *, host_pages: int = 0, sharing: bool = True,
                 window: int | None = None) -> None:
        for name, number, least in (("pages", pages, 1), ("page_size", page_size, 1),
                                    ("host_pages", host_pages, 0), ("window", window, 1)):
            if number is None and name == "window": continue
            if type(number) is not int or number < least:
                raise PageError(f"a pool with {name}={number!r}", f"a whole number, at least {least}")
        super().__init__(pages, page_size, host_pages, sharing, window)
        self._secret = os.urandom(16)

    def open(self, tokens: Sequence[int], salt: bytes = b"") -> Table:
        """A table that shares the longest run of cached pages with which `tokens` begin, but not the last
        token: its row is to be computed. `salt`: only what was written with the same is shared."""
        table = Table(self, Prefix(root(self._secret, salt), self.page_size))
        if self.sharing: table.share(tokens)
        return table

    def take_moves(self) -> tuple[Move, ...]:
        """The copies that the batch being assembled must carry, in this order, before it computes. The next
        batch begins."""
        moves = tuple(self.moves)
        self.moves.clear()
        self.batch += 1
        return moves

    def recover(self, batch: int, tables: Iterable[Table]) -> None:
        """Batch `batch` failed, and those after it have run on what it left or not at all; none runs any
        more. Cached pages that they were to write are forgotten, and each of `tables`, all there are, is cut
        back to whole pages written before: its `computed` says where to go on. `batch` 0: nothing that the
        device holds is trusted."""
        self.moves.clear()
        for pages in (self.device, self.host):
            for page in list(pages.found.values()):
                if pages.since[page] >= batch: pages.forget(page)
        for table in tables: table.cut(batch)

    # **** what is to be seen ****

    def stats(self) -> PoolStats:
        """Counts of now, and since the beginning."""
        def states(pages: Pages) -> tuple[int, int, int, int]:
            free, cached = len(pages.free), len(pages.idle)
            return pages.total, free, cached, pages.total - free - cached
        return PoolStats(*states(self.device), *states(self.host), self.hits, self.queries,
                         self.device.evictions, *(self.moved[where] for where in Where))

    def assert_conserved(self, tables: Iterable[Table]) -> None:
        """Asserts that each page is free, cached or in use, and that its references are those of `tables`,
        all there are."""
        held = list(tables)
        for name, pages, lists in (("device", self.device, [table.held_pages for table in held]),
                                   ("host", self.host, [table.host_pages for table in held])):
            counted = Counter(page for each in lists for page in each)
            free, idle = set(pages.free), set(pages.idle)
            assert len(free) == len(pages.free), f"{name}: a page is free twice"
            assert free.isdisjoint(idle), f"{name}: pages {free & set(idle)} are free and cached"
            assert counted.keys().isdisjoint(free | idle), f"{name}: a page in use is free or cached"
            assert len(free) + len(idle) + len(counted) == pages.total, \
                f"{name}: {len(free)} free + {len(idle)} cached + {len(counted)} in use ≠ {pages.total}"
            for page, count in enumerate(pages.references):
                assert count == counted[page], f"{name} page {page}: {count} references, {counted[page]} held"
            for page, key in enumerate(pages.keys):
                assert key is None or pages.found.get(key) == page, f"{name} page {page}: found elsewhere"
                assert key is None or page not in free, f"{name} page {page}: free, and found"
                assert key is not None or page not in idle, f"{name} page {page}: cached, and found by nobody"
            assert len(pages.found) == sum(key is not None for key in pages.keys), f"{name}: stale hashes"
