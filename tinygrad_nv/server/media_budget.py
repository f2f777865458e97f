"""Memory that images and recordings of all requests may take together while they are decoded.

Protocol: `async with budget.hold(nbytes)` waits until so much is free, in the order of arrival; what is
larger than the budget waits until nothing else is held. For one event loop.
"""
from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

MEDIA_BYTES = 768 << 20     # limit: bytes of images and recordings that are being decoded, of all requests


class MediaBudget:
    """See above."""

    def __init__(self, nbytes: int = MEDIA_BYTES) -> None:
        self.most, self.free = nbytes, nbytes
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncGenerator[None, None]:
        """See above."""
        count = min(nbytes, self.most)
        if self.waiting or count > self.free: await self._wait(count)
        else: self.free -= count
        try: yield
        finally:
            self.free += count
            self._wake()

    async def _wait(self, count: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((count, future))
        try: await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled(): self.free += count
            self.waiting = deque(each for each in self.waiting if each[1] is not future)
            self._wake()
            raise

    def _wake(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.free:
            count, future = self.waiting.popleft()
            if future.done(): continue
            self.free -= count
            future.set_result(None)
