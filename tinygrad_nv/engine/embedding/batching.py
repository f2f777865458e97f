"""`EmbeddingEngine`: computes texts of many callers, batched, in a thread of its own.

Protocol: `submit(texts)` queues token ids and returns a future for each, of its pooled hidden states, or with
`every` of those of its tokens, which are steps of their own. The thread takes what waits, in
order, up to a step's tokens and texts, and sets the futures of a step together. A future that is cancelled
before its step runs is left out. An exception fails the texts of its step only. The thread is the only one
that uses tinygrad after the model is loaded.
"""
from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.failures import stopping
from tinygrad_nv.errors import NVError, QueueFull


class Runner(Protocol):
    """The device side."""
    max_seqs: int
    max_tokens: int

    def run(self, texts: Sequence[Sequence[int]]) -> np.ndarray: ...

    def run_tokens(self, texts: Sequence[Sequence[int]]) -> Sequence[np.ndarray]: ...


@dataclass(frozen=True)
class _Entry:
    """A text that waits."""
    text: Sequence[int]
    future: Future[np.ndarray]
    every: bool


class EmbeddingEngine:
    """Batches of `runner`. `queue_limit`: texts that may wait when more are submitted."""

    def __init__(self, runner: Runner, queue_limit: int) -> None:
        self.runner, self.queue_limit = runner, queue_limit
        self._waiting = deque[_Entry]()
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = self._tokens = self._steps = self._failed = 0
        self._closed = False

    @property
    def failure(self) -> NVError | None:
        """Steps fail one by one; the engine goes on."""
        return None

    def submit(self, texts: Sequence[Sequence[int]], every: bool = False) -> list[Future[np.ndarray]]:
        """Queues texts, each with at least one token and at most a step's. Raises `QueueFull`, or
        `EngineError` after `close`."""
        futures = [Future[np.ndarray]() for _ in texts]
        with self._arrived:
            if self._closed:
                raise stopping()
            if len(self._waiting) >= self.queue_limit:
                raise QueueFull(f"{len(self._waiting)} texts wait", f"less than {self.queue_limit}",
                                "retry later, or raise --max-queue")
            self._waiting.extend(_Entry(text, future, every)
                                 for text, future in zip(texts, futures, strict=True))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nv-embedding", daemon=True)
                self._thread.start()
            self._arrived.notify()
        return futures

    def stats(self) -> EngineStats:
        """Current statistics."""
        return EngineStats(self._running, len(self._waiting), 0.0, 0, 0, 0, 0, self._tokens, 0, self._steps,
                           self._failed, 0, 0)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuses new texts, waits up to `drain_s` seconds for the others, and cancels the rest."""
        ends = time.monotonic() + drain_s
        while (self._waiting or self._running) and time.monotonic() < ends: await asyncio.sleep(0.01)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Cancels texts that wait, and ends the thread."""
        with self._arrived:
            self._closed = True
            waiting = [*self._waiting]
            self._waiting.clear()
            self._arrived.notify()
        for each in waiting:
            # not cancelled: a caller that awaits it would take that for its own end
            if each.future.set_running_or_notify_cancel(): each.future.set_exception(stopping())
        if self._thread is not None: self._thread.join()

    def _run(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                if self._closed: return
                batch = self._next()
            if batch: self._step(batch)

    def _next(self) -> list[_Entry]:
        """Returns waiting entries, up to a step's size."""
        batch: list[_Entry] = []
        tokens = 0
        while self._waiting and len(batch) < self.runner.max_seqs:
            first = self._waiting[0]
            if batch and first.every != batch[0].every: break
            if (tokens := tokens + len(first.text)) > self.runner.max_tokens: break
            entry = self._waiting.popleft()
            if entry.future.set_running_or_notify_cancel(): batch.append(entry)
        self._running = len(batch)
        return batch

    def _step(self, batch: Sequence[_Entry]) -> None:
        texts, failure = [each.text for each in batch], None
        made: Sequence[np.ndarray] | np.ndarray | None = None
        try: made = self.runner.run_tokens(texts) if batch[0].every else self.runner.run(texts)
        except Exception as error: failure = error  # of the device, or a driver
        self._steps, self._tokens = self._steps + 1, self._tokens + sum(map(len, texts))
        self._running, self._failed = 0, self._failed + (made is None)
        for at, each in enumerate(batch):
            if made is None: each.future.set_exception(failure)
            else: each.future.set_result(made[at])
