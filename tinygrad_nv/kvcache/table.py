"""A sequence's pages.

Protocol. Page `pages[i]` holds keys and values of tokens i · page_size … of the sequence. The order of a
step: `reserve` the places that it writes, launch it with a copy of `pages`, and `advance` over the tokens it
writes: as soon as they are known and the batch is certain to be the next one, or later. `computed` counts the
tokens advanced over. Places from `computed` on may be written and written again, as long as nobody advances.

Pages before the first that any row can see are given back (`prune`; with the pool's window by `advance`):
their entries are −1, a beginning of the list.

A page with more than one reference, or that others find by its hash, is not written: `reserve` copies it, or
makes it be found no more.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.errors import PageError
from tinygrad_nv.kvcache import offload
from tinygrad_nv.kvcache.offload import Memories
from tinygrad_nv.kvcache.pages import Pages, Where
from tinygrad_nv.kvcache.prefix import Prefix

HOLE = -1


class Table:
    """A sequence's pages; `pool.open` makes one. Without pages (new, or after `release`) it may `share`."""
    __slots__ = ("computed", "host_pages", "pages", "pool", "prefix", "pruned", "size", "tail")

    def __init__(self, pool: Memories, prefix: Prefix) -> None:
        self.pool, self.prefix, self.size = pool, prefix, pool.page_size
        self.pages: list[int] = []
        self.computed = 0
        self.tail: list[int] = []           # the newest tokens, which `prefix` is told when a page is full
        self.pruned = 0                     # entries of `pages` that are holes
        self.host_pages: list[int] = []     # while away, in place of the pages that are no holes

    @property
    def held_pages(self) -> list[int]:
        """The pages that are no holes."""
        return self.pages[self.pruned:]

    @property
    def away(self) -> bool:
        """Whether the pages are the host's."""
        return bool(self.host_pages)

    # **** before a step ****

    def share(self, tokens: Sequence[int]) -> None:
        """Takes the longest run of cached pages with which `tokens` begin, without the last token. The table
        must have no pages. Tokens that it has seen before are not hashed again."""
        held = self.pages or self.host_pages
        assert not held, "a table that has pages shares no others"
        pool, prefix = self.pool, self.prefix
        size, device, host = self.size, pool.device.found, pool.host.found
        prefix.put(0, tokens)
        run, best, first = 0, 0, 0
        for page in range((len(tokens) - 1) // size):
            key = prefix.key(page)
            run = run + 1 if key in device or key in host else 0
            seen = 0 if pool.window is None else max(0, (page + 1) * size - pool.window + 1) // size
            if run >= page + 1 - seen: best, first = page + 1, seen
            elif pool.window is None: break
        pool.queries += len(tokens)
        pages = offload.found(pool, [prefix.key(page) for page in range(first, best)])
        if first and len(pages) < best - first:     # too few pages to bring all of a window back
            pool.device.drop(reversed(pages))
            pages, first = [], 0
        self.pages, self.pruned = [HOLE] * first + pages, first
        self.computed = len(self.pages) * size
        pool.hits += self.computed

    def missing(self, tokens: int, start: int | None = None) -> int:
        """How many pages `reserve` would take."""
        pool = self.pool
        references, first = pool.device.references, (self.computed if start is None else start)
        end = -(-tokens // self.size)
        shared = sum(references[page] > 1 for page in self.pages[first // self.size:end])
        return shared + max(0, end - len(self.pages))

    def reserve(self, tokens: int, start: int | None = None) -> bool:
        """Makes places 0 … `tokens` − 1 have pages, and those from `start` (by default `computed`) on be
        nobody else's: shared ones are copied before the next batch. All or nothing: False if there are too
        few pages."""
        assert not self.host_pages, "pages of the host hold no new tokens: restore them first"
        pool, pages, size = self.pool, self.pages, self.size
        references, keys = pool.device.references, pool.device.keys
        end, first = -(-tokens // size), (self.computed if start is None else start) // size
        if first + 1 == end <= len(pages) and references[page := pages[first]] == 1 and keys[page] is None:
            return True     # a token more in the last page, which is what most steps need
        more = max(0, end - len(pages))
        shared = [i for i in range(first, min(end, len(pages)))
                  if references[pages[i]] > 1 or keys[pages[i]] is not None]
        if shared:
            copied = sum(references[pages[i]] > 1 for i in shared)
            if more + copied > pool.available: return False
            for i in shared: self._own(i)
        elif more and more > pool.available: return False
        for _ in range(more): pages.append(pool.take())
        return True

    def _own(self, i: int) -> None:
        """Makes entry i a page that may be written."""
        pool, page = self.pool, self.pages[i]
        if pool.device.references[page] == 1: return pool.device.forget(page)
        self.pages[i] = copy = pool.take()
        pool.move(Where.WITHIN, page, copy)
        pool.device.drop((page,))

    # **** after a step ****

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens `computed`, computed + 1, … are these, and the batch being assembled, or one before it,
        writes them for certain. Pages that are full now are found by others."""
        count = len(tokens)
        self.tail += tokens
        self.computed = computed = self.computed + count
        if computed % self.size >= count: return     # no page is full that was not
        pool, old = self.pool, computed - count
        self._note()
        self._filled(old // self.size, computed // self.size)
        # the batch being assembled may compute these tokens' rows, and others' into what is given back now
        if pool.window is not None and not self.host_pages: self.prune(old - pool.window + 1)

    def _note(self) -> None:
        """Tells `prefix` the newest tokens."""
        if self.pool.sharing: self.prefix.put(self.computed - len(self.tail), self.tail)
        self.tail = []

    def _filled(self, first: int, end: int) -> None:
        """Entries first … end − 1 are full."""
        pool = self.pool
        side, pages, holes = pool.device, self.pages, 0
        if self.host_pages: side, pages, holes = pool.host, self.host_pages, self.pruned
        assert end <= holes + len(pages), f"{self.computed} tokens in {holes + len(pages)} pages"
        for i in range(first, end):
            page = pages[i - holes]
            side.since[page] = pool.batch
            if pool.sharing: side.register(page, self.prefix.key(i))

    def side(self) -> tuple[Pages, list[int]]:
        """The memory that the sequence is in, and its pages there."""
        if self.host_pages: return self.pool.host, self.host_pages
        return self.pool.device, self.held_pages

    # **** shapes of a sequence ****

    def fork(self) -> Table:
        """A sequence that begins as this one, and has the same pages until one of both writes."""
        self._note()
        made = Table(self.pool, self.prefix.copy())
        made.pages, made.computed, made.pruned = self.pages[:], self.computed, self.pruned
        made.host_pages = self.host_pages[:]
        side, pages = self.side()
        for page in pages: side.share(page)
        return made

    def prune(self, before: int) -> None:
        """Gives back pages whose tokens all stand before `before`: no row sees them any more."""
        assert not self.host_pages, "restore a sequence before it is pruned"
        end = min(before, self.computed) // self.size
        if end <= self.pruned: return
        self.pool.device.drop(reversed(self.pages[self.pruned:end]))
        self.pages[self.pruned:end] = [HOLE] * (end - self.pruned)
        self.pruned = end

    def truncate(self, tokens: int) -> None:
        """Gives back pages from place `tokens` on, reserved or written; `computed` is at most `tokens` then,
        and what stood behind is found by nobody. Raises `PageError` where a row at `tokens` would see what
        was pruned."""
        assert not self.host_pages, "restore a sequence before it is truncated"
        size, device = self.size, self.pool.device
        if tokens < self.computed:
            if not self._sees(tokens):
                raise PageError(f"a sequence cut to {tokens} tokens, whose first {self.pruned * size} were "
                                "pruned", "what a row there sees", "release it, and compute it again")
            self._note()
            for page in self.pages[tokens // size:self.computed // size]: device.forget(page)
            self.computed = tokens
        self._keep(-(-tokens // size))

    def _sees(self, tokens: int) -> bool:
        """Whether all is there that a row at place `tokens` sees; without a window, all that was left."""
        behind = tokens if self.pool.window is None else max(0, tokens - self.pool.window + 1)
        return behind >= self.pruned * self.size

    def _keep(self, count: int) -> None:
        """The first `count` entries."""
        side, pages = self.side()
        left = max(0, count - self.pruned)
        side.drop(reversed(pages[left:]))
        if not self.host_pages: del self.pages[self.pruned + left:]
        else:
            del self.host_pages[left:]
            if not self.host_pages: self.pages = [HOLE] * self.pruned

    def cut(self, batch: int) -> None:
        """Keeps the whole pages before the first that `batch` or a later one was to write (`recover`)."""
        self._note()
        side, pages = self.side()
        full = self.computed // self.size
        trusted = next((i for i, page in enumerate(pages[:full - self.pruned]) if side.since[page] >= batch),
                       full - self.pruned)
        tokens = (self.pruned + trusted) * self.size
        if tokens < self.computed and not self._sees(tokens): return self.release()
        self._keep(self.pruned + trusted)
        self.computed = tokens

    def release(self) -> None:
        """Gives all pages back. The table may `share` again then, and knows its tokens' hashes."""
        self._note()
        side, pages = self.side()
        side.drop(reversed(pages))
        self.pages, self.host_pages, self.computed, self.pruned = [], [], 0, 0

    # **** to the host and back ****

    def offload(self) -> bool:
        """Moves all pages to the host, reserved ones too; `pages` is empty then, and `computed` stays. False,
        and nothing done, if there are too few of the host."""
        made = offload.offload(self.pool, self.held_pages)
        if made: self.pages, self.host_pages = [], made
        return made is not None

    def restore(self) -> bool:
        """Moves them back. False, and nothing done, if there are too few."""
        made = offload.restore(self.pool, self.host_pages)
        if made is None: return False
        self.pages, self.host_pages = [HOLE] * self.pruned + made, []
        return True
