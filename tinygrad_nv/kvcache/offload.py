"""Pages of a device and of the host beside it, and copies from one to the other.

Protocol. `Memories` is what the pool of both and the tables over it share. Host pages are counted, shared and
found as the device's are, and a full page may be in both: a copy is never made twice, and a page that came
back goes again without one. Copies are `Move`s of the next batch, in the order in which they were asked for,
so a page may be given on as soon as its copy is queued: who takes it queues, or computes, behind.

    keep                what is about to be evicted goes to the host, if a page there can be had
    found               full pages by their keys, wherever they are, with a reference more
    offload, restore    a table's pages, all or nothing
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.kvcache.pages import Move, Pages, Where


class Memories:
    """`pages` pages of `page_size` tokens, and `host_pages` of the host; what a batch must copy. `sharing`
    and `window` as `PagePool` has them."""

    def __init__(self, pages: int, page_size: int, host_pages: int, sharing: bool,
                 window: int | None) -> None:
        self.page_size, self.sharing, self.window = page_size, sharing, window
        self.device, self.host = Pages(pages), Pages(host_pages)
        self.batch = 0
        self.moves: list[Move] = []
        self.hits = self.queries = 0
        self.moved = dict.fromkeys(Where, 0)

    @property
    def available(self) -> int:
        """Pages that tables could still take: free ones, and cached ones without a reference."""
        return len(self.device.free) + len(self.device.idle)

    def take(self) -> int:
        """A page of the device, with one reference. There must be one available."""
        device = self.device
        if self.host.total and not device.free: keep(self, next(iter(device.idle)))
        return device.take(self.batch)

    def move(self, where: Where, source: int, target: int) -> None:
        """Has a page copied before the next batch."""
        self.moves.append(Move(where, source, target))
        self.moved[where] += 1


def keep(pool: Memories, page: int) -> None:
    """A cached page of the device, which is about to be evicted, is in the host's cache afterwards, the last
    there to go, if any page of the host can be had."""
    host, key = pool.host, pool.device.keys[page]
    assert key is not None
    if (there := host.found.get(key)) is not None:
        if there in host.idle: host.idle.move_to_end(there)
    elif host.available: host.drop((out(pool, page),))


def out(pool: Memories, page: int) -> int:
    """Copies a page of the device to one of the host, which has its key then and a reference."""
    key, made = pool.device.keys[page], pool.host.take(pool.batch)
    pool.move(Where.OUT, page, made)
    if key is not None: pool.host.register(made, key)
    return made


def back(pool: Memories, page: int) -> int:
    """Copies a page of the host, which must have a reference, to one of the device, which has its key then
    and a reference."""
    key, made = pool.host.keys[page], pool.take()
    pool.move(Where.BACK, page, made)
    if key is not None: pool.device.register(made, key)
    return made


def found(pool: Memories, keys: Sequence[bytes]) -> list[int]:
    """Pages of the device with these keys, with a reference more each; where pages of the host have them,
    copies. As many from the first on as there are pages for them."""
    made: list[int] = []
    for key in keys:
        if (page := pool.device.found.get(key)) is not None: pool.device.share(page)
        elif (there := pool.host.found.get(key)) is None or not pool.available: break
        else:
            pool.host.share(there)
            page = back(pool, there)
            pool.host.drop((there,))
        made.append(page)
    return made


def offload(pool: Memories, pages: Sequence[int]) -> list[int] | None:
    """Moves pages of the device to the host: their numbers there. None, and nothing done, if there are too
    few of the host."""
    there = _elsewhere(pool.device, pages, pool.host)
    if there is None: return None
    made = [out(pool, page) if copy is None else copy for page, copy in zip(pages, there, strict=True)]
    pool.device.drop(reversed(pages))
    return made


def restore(pool: Memories, pages: Sequence[int]) -> list[int] | None:
    """Moves pages of the host back: their numbers on the device. None, and nothing done, if there are too
    few."""
    there = _elsewhere(pool.host, pages, pool.device)
    if there is None: return None
    made = [back(pool, page) if copy is None else copy for page, copy in zip(pages, there, strict=True)]
    pool.host.drop(reversed(pages))
    return made


def _elsewhere(here: Pages, pages: Sequence[int], other: Pages) -> list[int | None] | None:
    """For each page the copy that the other memory has, with a reference more, or None; None for all if the
    others do not have room there."""
    keys = [here.keys[page] for page in pages]
    there = [None if key is None else other.found.get(key) for key in keys]
    needed = sum(copy is None or not other.references[copy] for copy in there)
    if needed > other.available: return None
    for copy in there:
        if copy is not None: other.share(copy)
    return there
