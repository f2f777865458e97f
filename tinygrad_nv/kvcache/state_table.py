"""The states of a sequence, for models with layers that keep a state of fixed size in the place of keys and
values.

Protocol. A page of `StatePages` holds a sequence's states of all such layers after some number of tokens. A
`StateTable` has the page of the newest tokens, and those after full pages of tokens (borders) that are not in
the prefix cache yet. `step(start, end, computed)` says for a step that computes tokens start … end − 1 which
page it begins with, and which it writes; only pages of no other sequence are written, and the page that a
step begins with is not written by another sequence in the same step. `computed` tokens are known to the host:
borders up to there enter the prefix cache, where a later sequence with these tokens finds them together with
the pages of keys and values (block_table.py).

A border costs a page, a spare one. There are no more spares than pages beyond two for each of `sequences`:
without them a sequence holds the states that it begins a batch with, and takes a page for those after it, so
that pages are never short. Spares are counted until their batch is over.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
        self.spares = 0                     # pages of borders that are not the newest states of a table
        self.dropped: list[tuple[int, bool]] = []   # which the batch being assembled may still read

    @property
    def can_spare(self) -> bool:
        """Tells whether a page may be taken that no sequence needs."""
        return self.spares < self.device.total - self.needed

    def take(self) -> int:
        """Allocates a page with one reference."""
        return self.device.take(self.batch)

    def drop(self, page: int, spare: bool) -> None:
        """Removes a reference, after the batch being assembled."""
        self.dropped.append((page, spare))

    def release(self, page: int, spare: bool) -> None:
        """Removes a reference now: no batch being assembled reads the page."""
        self.spares -= spare
        self.device.drop((page,))

    def next_batch(self, batch: int) -> None:
        """Begins to assemble another batch."""
        dropped, self.dropped, self.batch = self.dropped, [], batch
        for page, spare in dropped: self.release(page, spare)

    def find(self, key: bytes) -> int:
        """The page of a prefix by its hash, NONE where it is not cached, or written by the batch being
        assembled: sequences of one batch run at the same time."""
        page = self.device.by_hash.get(key + SUFFIX, NONE)
        return NONE if page != NONE and self.device.written_in[page] >= self.batch else page

    def assert_conserved(self, tables: Iterable[StateTable | None]) -> None:
        """Asserts that references and spares are those of `tables`, which must be all, and of what was
        dropped."""
        known = [table for table in tables if table is not None]
        counted = Counter(page for table in known for page in table.entries.values())
        counted.update(page for page, _ in self.dropped)
        assert all(count == counted[page] for page, count in enumerate(self.device.references)), "references"
        spares = sum(len(table.spares) for table in known) + sum(spare for _, spare in self.dropped)
        assert spares == self.spares, f"{self.spares} spares, {spares} held"
        assert self.device.available + len(counted) == self.device.total, "a page is lost"

    def forget(self, batch: int) -> None:
        """Removes what `batch` and later ones were to write from the prefix cache."""
        device = self.device
        for page in list(device.by_hash.values()):
            if device.written_in[page] >= batch: device.forget(page)


class StateTable:
    """A sequence's pages of states, by the number of tokens they stand for."""
    __slots__ = ("entries", "pool", "prefix", "spares")

    def __init__(self, pool: StatePages, prefix: PrefixHashes) -> None:
        self.pool, self.prefix = pool, prefix
        self.entries: dict[int, int] = {}
        self.spares: set[int] = set()       # of the entries

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
        self.pool.device.share(page)
        self.entries[tokens] = page

    def step(self, start: int, end: int, computed: int) -> StateStep:
        """The pages of a step that computes tokens start … end − 1."""
        assert start == self.newest, f"states after {self.newest} tokens, a step from {start} on"
        pool, size = self.pool, self.pool.page_size
        source, border, kept = self.entries.get(start, NONE), end // size * size, NONE
        if pool.sharing and start < border < end and pool.can_spare:
            kept = self.entries[border] = pool.take()
            self._spare(border)
        target, own = source, source != NONE and self._is_own(source)
        if not own: target = pool.take()
        elif pool.sharing and start % size == 0 and pool.can_spare:
            target = pool.take()
            self._spare(start)
        else: del self.entries[start]
        self.entries[end] = target
        pool.device.written_in[target] = pool.batch
        self.register(computed)
        return StateStep(source, border - start if kept != NONE else 0, kept, target)

    def _spare(self, tokens: int) -> None:
        self.spares.add(tokens)
        self.pool.spares += 1

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
            if tokens < newest and (known or tokens % size):
                pool.drop(self.entries.pop(tokens), tokens in self.spares)
                self.spares.discard(tokens)

    def fork(self, prefix: PrefixHashes) -> StateTable:
        """A table with the same newest states."""
        made = StateTable(self.pool, prefix)
        if self.entries:
            made.entries[self.newest] = page = self.entries[self.newest]
            self.pool.device.share(page)
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
                self.pool.release(page, each in self.spares)
                self.spares.discard(each)

    def release(self) -> None:
        """Releases all states."""
        self.keep(NONE)
