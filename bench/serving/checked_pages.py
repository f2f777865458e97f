"""An allocator of pages that is held to a model of its own, for page_operations.py."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tinygrad_nv.kvcache.page_allocator import PageAllocator


class CheckedPages(PageAllocator):
    """An allocator whose operations are counted, and compared with `held`. Raises AssertionError."""
    __slots__ = ("counts", "held", "in_use")

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.held, self.in_use = [0] * total, 0
        self.counts: Counter[str] = Counter()

    def take(self, batch: int) -> int:
        evicted = not self.free
        page = super().take(batch)
        assert not self.held[page], f"page {page} was taken while {self.held[page]} hold it"
        self.held[page] = 1
        self.in_use += 1
        self.counts["evicted" if evicted else "taken"] += 1
        self.balance()
        return page

    def share(self, page: int) -> None:
        super().share(page)
        if not self.held[page]: self.in_use += 1
        self.held[page] += 1
        self.counts["shared"] += 1
        self.balance()

    def drop(self, pages: Iterable[int]) -> None:
        dropped = list(pages)
        super().drop(dropped)
        for page in dropped:
            self.held[page] = left = self.held[page] - 1
            assert left >= 0, f"page {page} was dropped, and none held it"
            if not left: self.in_use -= 1
        self.counts["dropped"] += len(dropped)
        self.balance()

    def balance(self) -> None:
        """Asserts that used + free + cached = total."""
        free, cached = len(self.free), len(self.evictable)
        assert self.in_use + free + cached == self.total, \
            f"{self.in_use} used + {free} free + {cached} cached ≠ {self.total}"

    def count(self, held: Iterable[int]) -> None:
        """Asserts that block tables hold each page as often as the model and the allocator say."""
        counted = [0] * self.total
        for page in held: counted[page] += 1
        for page, three in enumerate(zip(counted, self.held, self.references, strict=True)):
            assert len(set(three)) == 1, \
                f"page {page}: in {three[0]} tables, held {three[1]} times, {three[2]} references"

    @property
    def missing_pages(self) -> int:
        """Pages that are neither free nor cached."""
        return self.total - len(self.free) - len(self.evictable)
