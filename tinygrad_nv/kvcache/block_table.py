"""The block table of a sequence.

Protocol. Page `pages[i]` holds keys and values of tokens i · page_size … of the sequence. The order of a
step: `reserve` the positions that it writes, launch it with a copy of `pages`, and `advance` over its tokens
as soon as they are known and the batch is certain to be the next one, or later. `computed` counts the tokens
advanced over. Positions from `computed` on may be written any number of times until then.

Pages that no token attends to any more are freed (`prune`; with the pool's window also by `advance`). Their
entries, a prefix of the list, are −1.

A page with more than one reference, or with a hash in the prefix cache, is never written: `reserve` copies
it, or removes its hash.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.errors import PageError
from tinygrad_nv.kvcache import offload
from tinygrad_nv.kvcache.offload import TieredPages
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageAllocator
from tinygrad_nv.kvcache.prefix_hashes import PrefixHashes

PRUNED = -1


class BlockTable:
    """A sequence's pages, created by `pool.open`. A table without pages (new, or after `release`) may
    `share`."""
    __slots__ = ("computed", "host_pages", "pages", "pool", "prefix", "pruned", "size", "tail")

    def __init__(self, pool: TieredPages, prefix: PrefixHashes) -> None:
        self.pool, self.prefix, self.size = pool, prefix, pool.page_size
        self.pages: list[int] = []
        self.computed = 0
        self.tail: list[int] = []           # the newest tokens, hashed when their page is full
        self.pruned = 0                     # number of pruned entries of `pages`
        self.host_pages: list[int] = []     # while offloaded, in place of the pages not pruned

    @property
    def held_pages(self) -> list[int]:
        """The pages that are not pruned."""
        return self.pages[self.pruned:]

    @property
    def offloaded(self) -> bool:
        """Whether the pages are on the host."""
        return bool(self.host_pages)

    # **** before a step ****

    def share(self, tokens: Sequence[int]) -> None:
        """Shares the longest cached prefix of `tokens`, without the last token. The table must have no pages.
        Tokens hashed before are not hashed again."""
        held = self.pages or self.host_pages
        assert not held, "a table with pages cannot share others"
        pool, prefix = self.pool, self.prefix
        size, device, host = self.size, pool.device.by_hash, pool.host.by_hash
        prefix.put(0, tokens)
        run, best, first = 0, 0, 0
        for page in range((len(tokens) - 1) // size):
            key = prefix.key(page)
            run = run + 1 if key in device or key in host else 0
            seen = 0 if pool.window is None else max(0, (page + 1) * size - pool.window + 1) // size
            if run >= page + 1 - seen: best, first = page + 1, seen
            elif pool.window is None: break
        pool.queries += len(tokens)
        pages = offload.find_pages(pool, [prefix.key(page) for page in range(first, best)])
        if first and len(pages) < best - first:     # too few pages to restore a whole window
            pool.device.drop(reversed(pages))
            pages, first = [], 0
        self.pages, self.pruned = [PRUNED] * first + pages, first
        self.computed = len(self.pages) * size
        pool.hits += self.computed

    def num_missing_pages(self, tokens: int, start: int | None = None) -> int:
        """How many pages `reserve` would take."""
        pool = self.pool
        references, first = pool.device.references, (self.computed if start is None else start)
        end = -(-tokens // self.size)
        shared = sum(references[page] > 1 for page in self.pages[first // self.size:end])
        return shared + max(0, end - len(self.pages))

    def reserve(self, tokens: int, start: int | None = None) -> bool:
        """Ensures that positions 0 … `tokens` − 1 have pages, and that those from `start` (default:
        `computed`) on are exclusive: shared ones are copied before the next batch. All or nothing: False if
        too few pages are available."""
        assert not self.host_pages, "host pages take no new tokens: restore them first"
        pool, pages, size = self.pool, self.pages, self.size
        references, keys = pool.device.references, pool.device.hashes
        end, first = -(-tokens // size), (self.computed if start is None else start) // size
        if first + 1 == end <= len(pages) and references[page := pages[first]] == 1 and keys[page] is None:
            return True     # the common case: one more token in the last page
        more = max(0, end - len(pages))
        shared = [i for i in range(first, min(end, len(pages)))
                  if references[pages[i]] > 1 or keys[pages[i]] is not None]
        if shared:
            copied = sum(references[pages[i]] > 1 for i in shared)
            if more + copied > pool.available: return False
            for i in shared: self._make_writable(i)
        elif more and more > pool.available: return False
        for _ in range(more): pages.append(pool.take())
        return True

    def _make_writable(self, i: int) -> None:
        """Makes entry i an exclusive page without a hash."""
        pool, page = self.pool, self.pages[i]
        if pool.device.references[page] == 1: return pool.device.forget(page)
        self.pages[i] = copy = pool.take()
        pool.copy(CopyKind.DEVICE_TO_DEVICE, page, copy)
        pool.device.drop((page,))

    # **** after a step ****

    def advance(self, tokens: Sequence[int]) -> None:
        """Records tokens `computed`, computed + 1, …, which the batch being assembled, or one before it,
        certainly writes. Pages that become full enter the prefix cache."""
        count = len(tokens)
        self.tail += tokens
        self.computed = computed = self.computed + count
        if computed % self.size >= count: return     # no page became full
        pool, old = self.pool, computed - count
        self._hash_tail()
        self._register_full(old // self.size, computed // self.size)
        # only up to the first of these tokens: the batch being assembled may still compute them
        if pool.window is not None and not self.host_pages: self.prune(old - pool.window + 1)

    def _hash_tail(self) -> None:
        """Appends the newest tokens to `prefix`."""
        if self.pool.sharing: self.prefix.put(self.computed - len(self.tail), self.tail)
        self.tail = []

    def _register_full(self, first: int, end: int) -> None:
        """Registers entries first … end − 1, which are full."""
        pool = self.pool
        memory, pages, num_pruned = pool.device, self.pages, 0
        if self.host_pages: memory, pages, num_pruned = pool.host, self.host_pages, self.pruned
        assert end <= num_pruned + len(pages), f"{self.computed} tokens in {num_pruned + len(pages)} pages"
        for i in range(first, end):
            page = pages[i - num_pruned]
            memory.written_in[page] = pool.batch
            if pool.sharing: memory.register(page, self.prefix.key(i))

    def memory(self) -> tuple[PageAllocator, list[int]]:
        """The memory that holds the sequence, and its pages there."""
        if self.host_pages: return self.pool.host, self.host_pages
        return self.pool.device, self.held_pages

    # **** fork, prune, truncate ****

    def fork(self) -> BlockTable:
        """A table with the same tokens and pages, shared until either of the two writes."""
        self._hash_tail()
        made = BlockTable(self.pool, self.prefix.copy())
        made.pages, made.computed, made.pruned = self.pages[:], self.computed, self.pruned
        made.host_pages = self.host_pages[:]
        memory, pages = self.memory()
        for page in pages: memory.share(page)
        return made

    def prune(self, before: int) -> None:
        """Frees pages whose tokens are all before position `before`."""
        assert not self.host_pages, "restore a sequence before pruning it"
        end = min(before, self.computed) // self.size
        if end <= self.pruned: return
        self.pool.device.drop(reversed(self.pages[self.pruned:end]))
        self.pages[self.pruned:end] = [PRUNED] * (end - self.pruned)
        self.pruned = end

    def truncate(self, tokens: int) -> None:
        """Frees pages from position `tokens` on, reserved or written. `computed` becomes at most `tokens`,
        and pages past it leave the prefix cache. Raises `PageError` if a token at position `tokens` would
        attend to pruned pages."""
        assert not self.host_pages, "restore a sequence before truncating it"
        size, device = self.size, self.pool.device
        if tokens < self.computed:
            if not self._has_visible(tokens):
                raise PageError(f"a sequence truncated to {tokens} tokens, whose first {self.pruned * size} "
                                "were pruned", "pages that the next token attends to",
                                "release it, and compute it again")
            self._hash_tail()
            for page in self.pages[tokens // size:self.computed // size]: device.forget(page)
            self.computed = tokens
        self._shrink(-(-tokens // size))

    def _has_visible(self, tokens: int) -> bool:
        """Whether all pages that a token at position `tokens` attends to are present; without a window, all
        that were not pruned."""
        behind = tokens if self.pool.window is None else max(0, tokens - self.pool.window + 1)
        return behind >= self.pruned * self.size

    def _shrink(self, count: int) -> None:
        """Keeps the first `count` entries."""
        memory, pages = self.memory()
        left = max(0, count - self.pruned)
        memory.drop(reversed(pages[left:]))
        if not self.host_pages: del self.pages[self.pruned + left:]
        else:
            del self.host_pages[left:]
            if not self.host_pages: self.pages = [PRUNED] * self.pruned

    def rollback(self, batch: int) -> None:
        """Keeps the whole pages before the first that `batch` or a later one was to write
        (`PagePool.recover`)."""
        self._hash_tail()
        memory, pages = self.memory()
        full = self.computed // self.size
        num_valid = next((i for i, page in enumerate(pages[:full - self.pruned])
                          if memory.written_in[page] >= batch), full - self.pruned)
        tokens = (self.pruned + num_valid) * self.size
        if tokens < self.computed and not self._has_visible(tokens): return self.release()
        self._shrink(self.pruned + num_valid)
        self.computed = tokens

    def release(self) -> None:
        """Frees all pages. The table may `share` again; it keeps its tokens' hashes."""
        self._hash_tail()
        memory, pages = self.memory()
        memory.drop(reversed(pages))
        self.pages, self.host_pages, self.computed, self.pruned = [], [], 0, 0

    # **** offload ****

    def offload(self) -> bool:
        """Moves all pages to the host, reserved ones too. `pages` is then empty, and `computed` unchanged.
        False, with nothing changed, if the host is out of pages."""
        made = offload.offload(self.pool, self.held_pages)
        if made: self.pages, self.host_pages = [], made
        return made is not None

    def restore(self) -> bool:
        """Moves the pages back to the device. False, with nothing changed, if it is out of pages."""
        made = offload.restore(self.pool, self.host_pages)
        if made is None: return False
        self.pages, self.host_pages = [PRUNED] * self.pruned + made, []
        return True
