"""The block table of a sequence.

Protocol. Page `pages[i]` holds keys and values of tokens i · page_size … of the sequence. The order of a
step: `reserve` the positions that it writes, launch it with a copy of `pages`, and `advance` over its tokens
as soon as they are known and the batch is certain to be the next one, or later. `computed` counts the tokens
advanced over. Positions from `computed` on may be written any number of times until then.

Pages that no token attends to any more are freed (`prune`; with a window also by `advance`). Their entries, a
prefix of the list, are −1.

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
from tinygrad_nv.kvcache.state_table import StatePages

PRUNED = -1


class BlockTable:
    """A sequence's pages of one group of layers (groups.py), created by `pool.open`. A table without pages
    (new, or after `release`) may `share`."""
    __slots__ = ("computed", "host_pages", "pages", "pool", "prefix", "pruned", "size", "suffix", "tail",
                 "window")

    def __init__(self, pool: TieredPages, prefix: PrefixHashes, group: int = 0) -> None:
        self.pool, self.prefix, self.size, self.window = pool, prefix, pool.page_size, pool.windows[group]
        self.suffix = bytes([group]) if group else b""      # of its pages' hashes
        self.pages: list[int] = []
        self.computed = 0
        self.tail: list[int] = []           # the newest tokens, hashed when their page is full
        self.pruned = 0                     # number of pruned entries of `pages`
        self.host_pages: list[int] = []     # while offloaded, in place of the pages not pruned

    @property
    def unpruned_pages(self) -> list[int]:
        """The pages that are not pruned."""
        return self.pages[self.pruned:]

    @property
    def num_entries(self) -> int:
        """Number of entries."""
        return len(self.pages)

    @property
    def groups(self) -> tuple[BlockTable, ...]:
        """The tables of all groups of layers: this one."""
        return (self,)

    @property
    def is_offloaded(self) -> bool:
        """Whether the pages are on the host."""
        return bool(self.host_pages)

    # **** before a step ****

    def share(self, tokens: Sequence[int]) -> None:
        """Shares the longest cached prefix of `tokens`, without the last token. The table must have no pages.
        Tokens hashed before are not hashed again."""
        share_prefix([self], tokens)

    def first_visible_page(self, tokens: int) -> int:
        """The first page that a token at position `tokens` attends to."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // self.size

    def num_missing_pages(self, tokens: int, start: int | None = None) -> int:
        """How many pages `reserve` would take; of an offloaded table, `restore` and then `reserve`."""
        if self.host_pages: return max(len(self.host_pages), -(-tokens // self.size) - self.pruned)
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
        old = computed - count
        self.hash_tail()
        self._register_full(old // self.size, computed // self.size)
        # only up to the first of these tokens: the batch being assembled may still compute them
        if self.window is not None and not self.host_pages: self.prune(old - self.window + 1)

    def hash_tail(self) -> None:
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
            if pool.sharing: memory.register(page, self.prefix.key(i) + self.suffix)

    def memory(self) -> tuple[PageAllocator, list[int]]:
        """The memory that holds the sequence, and its pages there."""
        if self.host_pages: return self.pool.host, self.host_pages
        return self.pool.device, self.unpruned_pages

    # **** fork, prune, truncate ****

    def fork(self) -> BlockTable:
        """A table with the same tokens and pages, shared until either of the two writes."""
        self.hash_tail()
        made = BlockTable(self.pool, self.prefix.copy())
        self.copy_to(made)
        return made

    def copy_to(self, other: BlockTable) -> None:
        """Shares all pages with a new table, whose hashes are those of this one."""
        self.hash_tail()
        other.pages, other.computed, other.pruned = self.pages[:], self.computed, self.pruned
        other.host_pages = self.host_pages[:]
        memory, pages = self.memory()
        for page in pages: memory.share(page)

    def prune_window(self, position: int) -> None:
        """Frees pages behind the window of a token at `position`, which no earlier token needs any more."""
        if self.window is not None: self.prune(position - self.window + 1)

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
            self.require_visible(tokens)
            self.hash_tail()
            for page in self.pages[tokens // size:self.computed // size]: device.forget(page)
            self.computed = tokens
        self._shrink(-(-tokens // size))

    def require_visible(self, tokens: int) -> None:
        """Raises `PageError` if a token at position `tokens` would attend to pruned pages."""
        if self._has_visible(tokens): return
        raise PageError(f"a sequence truncated to {tokens} tokens, whose first {self.pruned * self.size} "
                        "were pruned", "pages that the next token attends to",
                        "release it, and compute it again")

    def _has_visible(self, tokens: int) -> bool:
        """Whether all pages that a token at position `tokens` attends to are present; without a window, all
        that were not pruned."""
        behind = tokens if self.window is None else max(0, tokens - self.window + 1)
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
        self.keep_pages(self.num_valid_pages(batch))

    def num_valid_pages(self, batch: int) -> int:
        """Full pages before the first that `batch` or a later one was to write, pruned ones included."""
        self.hash_tail()
        memory, pages = self.memory()
        full = self.computed // self.size
        return next((i for i in range(self.pruned, full)
                     if memory.written_in[pages[i - self.pruned]] >= batch), full)

    def keep_pages(self, count: int) -> bool:
        """Keeps the first `count` pages, which are full. Releases all, and returns False, if the next token
        would attend to pruned pages."""
        tokens = count * self.size
        if tokens < self.computed and not self._has_visible(tokens):
            self.release()
            return False
        self._shrink(count)
        self.computed = tokens
        return True

    def release(self) -> None:
        """Frees all pages. The table may `share` again; it keeps its tokens' hashes."""
        memory, pages = self.memory()
        memory.drop(reversed(pages))
        self.clear()

    def clear(self) -> None:
        """Forgets the pages, whose references were dropped."""
        self.hash_tail()
        self.pages, self.host_pages, self.computed, self.pruned = [], [], 0, 0

    # **** offload ****

    def offload(self) -> bool:
        """Moves all pages to the host, reserved ones too. `pages` is then empty, and `computed` unchanged.
        False, with nothing changed, if the host is out of pages."""
        made = offload.offload(self.pool, self.unpruned_pages)
        if made: self.pages, self.host_pages = [], made
        return made is not None

    def restore(self) -> bool:
        """Moves the pages back to the device. False, with nothing changed, if it is out of pages."""
        made = offload.restore(self.pool, self.host_pages)
        if made is None: return False
        self.pages, self.host_pages = [PRUNED] * self.pruned + made, []
        return True


def share_prefix(tables: Sequence[BlockTable], tokens: Sequence[int],
                 states: StatePages | None = None) -> None:
    """The tables of a sequence, one for each group of layers, share the longest prefix that is cached for
    all of them: all its pages without a window, else those that the next token attends to; and whose `states`
    are cached, where there are such."""
    assert not any(each.pages or each.host_pages for each in tables), "a table with pages cannot share others"
    pool, prefix, size = tables[0].pool, tables[0].prefix, tables[0].size
    prefix.put(0, tokens)
    pool.queries += len(tokens)
    count = _num_cached_pages(tables, (len(tokens) - 1) // size, states)
    firsts = [each.first_visible_page(count * size) for each in tables]
    found = [offload.find_pages(pool, [prefix.key(page) + each.suffix for page in range(first, count)])
             for each, first in zip(tables, firsts, strict=True)]
    # fewer than were found, if there are too few pages to restore all of them from the host
    least = min(first + len(pages) for first, pages in zip(firsts, found, strict=True))
    if least < count and (any(firsts) or states): least = 0     # not a whole window, or other states
    if least < count: firsts = [0] * len(tables)
    for each, first, pages in zip(tables, firsts, found, strict=True):
        pool.device.drop(reversed(pages[least - first:]))
        each.pages, each.pruned = [PRUNED] * first + pages[:least - first], first
        each.computed = least * size
    pool.hits += least * size


def _num_cached_pages(tables: Sequence[BlockTable], most: int, states: StatePages | None) -> int:
    """Pages of the longest cached prefix, `most` at most."""
    pool, prefix, size = tables[0].pool, tables[0].prefix, tables[0].size
    device, host = pool.device.by_hash, pool.host.by_hash
    runs, best = [0] * len(tables), 0     # cached pages up to this one, without a gap
    for page in range(most):
        key, complete = prefix.key(page), True
        for i, each in enumerate(tables):
            own = key + each.suffix
            runs[i] = runs[i] + 1 if own in device or own in host else 0
            if runs[i] >= page + 1 - each.first_visible_page((page + 1) * size): continue
            if each.window is None: return best
            complete = False
        if complete and (states is None or states.find(key) >= 0): best = page + 1
    return best
