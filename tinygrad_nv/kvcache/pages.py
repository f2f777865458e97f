"""Pages of one memory, a device's or the host's: which are free, cached, in use.

Protocol. A page is its number, and what is known of it stands in lists by number, so that a block operation
costs no object. It is in one of three states:

    in use    `references` tables have it
    cached    none has, but it is full and `found` by the hash of its tokens: `idle`, in the order in which
              they go, the first one first
    free      none has, and nothing that anybody could ask for is in it

`take` prefers free pages; then the first of the idle is evicted. A sequence gives its pages back from the
last to the first (`drop`), so that its ends go before the beginnings, without which nobody finds the ends.
`since` is the number of the batch that wrote a page last, or the next one's while it is assembled: what a
failed batch was to write is known by it (`PagePool.recover`).
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Where(Enum):
    """From where to where a page is copied."""
    WITHIN = "within the device"    # copy on write
    OUT = "to the host"             # offload
    BACK = "from the host"


@dataclass(frozen=True)
class Move:
    """A copy of a page, all layers: `source` and `target` are numbers of pages of the device or the host."""
    where: Where
    source: int
    target: int


class Pages:
    """`total` pages, all free."""
    __slots__ = ("evictions", "found", "free", "idle", "keys", "references", "since", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.references = [0] * total
        self.since = [-1] * total
        self.keys: list[bytes | None] = [None] * total
        self.found: dict[bytes, int] = {}
        self.free = list(range(total - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that `take` could give."""
        return len(self.free) + len(self.idle)

    def take(self, batch: int) -> int:
        """A page with one reference, that `batch` will write. There must be one available."""
        if self.free: page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            key, self.keys[page] = self.keys[page], None
            assert key is not None
            del self.found[key]
            self.evictions += 1
        self.references[page] = 1
        self.since[page] = batch
        return page

    def share(self, page: int) -> None:
        """One reference more."""
        references = self.references
        if not references[page]: del self.idle[page]
        references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One reference less for each. Those that nobody has any more are cached if they are found by a
        hash, and the first of them is evicted first; else they are free."""
        references, keys, idle, free = self.references, self.keys, self.idle, self.free
        for page in pages:
            references[page] = left = references[page] - 1
            if left: continue
            if keys[page] is None: free.append(page)
            else: idle[page] = None

    def register(self, page: int, key: bytes) -> None:
        """From now on the page is found by `key`, unless it has a hash or another page has this one."""
        if self.keys[page] is None and key not in self.found:
            self.keys[page] = key
            self.found[key] = page

    def forget(self, page: int) -> None:
        """From now on nobody finds the page."""
        key = self.keys[page]
        if key is None: return
        self.keys[page] = None
        del self.found[key]
        if not self.references[page]:
            del self.idle[page]
            self.free.append(page)
