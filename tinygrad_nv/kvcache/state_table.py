"""The states of a sequence, for models with layers that keep a state of fixed size in the place of keys and
values.

Protocol. A page of `StatePages` holds a sequence's states of all such layers after some number of tokens. A
`StateTable` has the page of the newest tokens, and those after full pages of tokens (borders) that are not in
the prefix cache yet. `step(start, end, computed)` says for a step that computes tokens start … end − 1 which
page it begins with, and which it writes; only pages of no other sequence are written, and the page that a
step begins with is not written by another sequence in the same step. `computed` tokens are known to the host:
borders up to there enter the prefix cache, where a later sequence with these tokens finds them together with
the pages of keys and values (block_table.py).

A border costs a page. Where too few are left it is not kept: pages that running sequences need are never
short, as there are two for each of `sequences` at least.
"""
from __future__ import annotations

from typing import NamedTuple

from tinygrad_nv.kvcache.page_allocator import PageAllocator
from tinygrad_nv.kvcache.prefix_hashes import PrefixHashes

PAGES_OF_SEQUENCE = 2   # one that is shared, or that a running step reads, and one that is written
SUFFIX = b"states"      # of the hashes of pages
NONE = -1


class StateStep(NamedTuple):
    """The pages of a sequence in a step: that with the states before its tokens, NONE for zeros; that with
    the states after `border` of its tokens, NONE where these are not kept; and that with the states after
    all."""
    source: int
    border: int
    kept: int
    target: int


class StatePages:
    """`total` pages of states for at most `sequences` sequences. `sharing`: borders are kept. `batch` is the
    number of the batch being assembled, as the page pool counts them."""

    def __init__(self, total: int, sequences: int, page_size: int, sharing: bool) -> None:
        assert total >= PAGES_OF_SEQUENCE * sequences, "pages of states for all sequences"
        self.device, self.page_size, self.sharing = PageAllocator(total), page_size, sharing
        self.needed = PAGES_OF_SEQUENCE * sequences
        self.batch = 0
        self.in_use = 0                     # pages that tables have taken, each sequence's share counted
        self._dropped: list[int] = []       # which the batch being assembled may still read

    @property
    def can_spare(self) -> bool:
        """Whether a page may be taken that no sequence needs."""
        return self.device.available > self.needed - self.in_use

    def take(self) -> int:
        """Allocates a page with one reference."""
        self.in_use += 1
        return self.device.take(self.batch)

    def share(self, page: int) -> None:
        """Adds a reference."""
        self.in_use += 1
        self.device.share(page)

    def drop(self, page: int) -> None:
        """Removes a reference, after the batch being assembled."""
        self._dropped.append(page)

    def release(self, page: int) -> None:
        """Removes a reference now: no batch being assembled reads the page."""
        self.in_use -= 1
        self.device.drop((page,))

    def next_batch(self, batch: int) -> None:
        """Begins to assemble another batch."""
        dropped, self._dropped, self.batch = self._dropped, [], batch
        for page in dropped: self.release(page)

    def find(self, key: bytes) -> int:
        """The page of a prefix by its hash, NONE where it is not cached, or written by the batch being
        assembled: sequences of one batch run at the same time."""
        page = self.device.by_hash.get(key + SUFFIX, NONE)
        return NONE if page != NONE and self.device.written_in[page] >= self.batch else page

    def forget(self, batch: int) -> None:
        """Removes what `batch` and later ones were to write from the prefix cache."""
        device = self.device
        for page in list(device.by_hash.values()):
            if device.written_in[page] >= batch: device.forget(page)


class StateTable:
    """A sequence's pages of states, by the number of tokens they stand for."""
    __slots__ = ("entries", "pool", "prefix")

    def __init__(self, pool: StatePages, prefix: PrefixHashes) -> None:
        self.pool, self.prefix = pool, prefix
        self.entries: dict[int, int] = {}

    @property
    def newest(self) -> int:
        """Tokens of the newest states."""
        return max(self.entries, default=0)

    def share(self, tokens: int) -> None:
        """Begins with the cached states after so many tokens, which `StatePages.find` has found."""
        assert not self.entries, "a table with pages cannot share others"
        if not tokens: return
        page = self.pool.find(self.prefix.key(tokens // self.pool.page_size - 1))
        assert page != NONE, "states that were found"
        self.pool.share(page)
        self.entries[tokens] = page

    def step(self, start: int, end: int, computed: int) -> StateStep:
        """The pages of a step that computes tokens start … end − 1."""
        assert start == self.newest, f"states after {self.newest} tokens, a step from {start} on"
        pool, size = self.pool, self.pool.page_size
        source, border, kept = self.entries.get(start, NONE), end // size * size, NONE
        if pool.sharing and start < border < end and pool.can_spare:
            kept = self.entries[border] = pool.take()
        target = source
        if source == NONE or not self._is_own(source) or (
                pool.sharing and start % size == 0 and pool.can_spare): target = pool.take()
        else: del self.entries[start]
        self.entries[end] = target
        pool.device.written_in[target] = pool.batch
        self.register(computed)
        return StateStep(source, border - start if kept != NONE else 0, kept, target)

    def _is_own(self, page: int) -> bool:
        device = self.pool.device
        return device.references[page] == 1 and device.hashes[page] is None

    def register(self, computed: int) -> None:
        """Enters borders up to `computed` tokens, which are known, into the prefix cache, and drops what is
        older than the newest states."""
        pool, size, newest = self.pool, self.pool.page_size, self.newest
        for tokens, page in list(self.entries.items()):
            known = tokens <= computed
            if pool.sharing and known and tokens % size == 0:
                pool.device.register(page, self.prefix.key(tokens // size - 1) + SUFFIX)
            if tokens < newest and (known or tokens % size): pool.drop(self.entries.pop(tokens))

    def fork(self, prefix: PrefixHashes) -> StateTable:
        """A table with the same newest states."""
        made = StateTable(self.pool, prefix)
        if self.entries:
            made.entries[self.newest] = page = self.entries[self.newest]
            self.pool.share(page)
        return made

    def last_valid(self, most: int, batch: int) -> int:
        """The largest border of at most `most` tokens whose states were written before `batch`, 0 for
        none."""
        written, size = self.pool.device.written_in, self.pool.page_size
        return max((tokens for tokens, page in self.entries.items()
                    if tokens <= most and tokens % size == 0 and written[page] < batch), default=0)

    def keep(self, tokens: int) -> None:
        """Releases all states but those after `tokens` tokens."""
        for each, page in list(self.entries.items()):
            if each != tokens:
                del self.entries[each]
                self.pool.release(page)

    def release(self) -> None:
        """Releases all states."""
        self.keep(NONE)
