"""`SpeechEngine`: the recordings of many callers, batched, in a thread of its own.

Protocol: `submit(recordings)` queues recordings and returns a future for each, of its `Transcription`. The
thread gives each a slot of the runner, in order, and runs one token of all of them in a step; a slot that
becomes free takes the next recording at once. A recording that is cancelled leaves its slot after its
current step. An exception fails the recordings that it concerns, as an `NVError`. The thread is the only one
that uses tinygrad after the model is loaded. What waits and what runs changes under the lock: `close` misses
none.
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
from tinygrad_nv.engine.failures import step_error, stopping
from tinygrad_nv.engine.speech.outputs import Transcription
from tinygrad_nv.engine.speech.recording import Recording, Steps
from tinygrad_nv.errors import EngineError, NVError, QueueFull


class Runner(Protocol):
    """The device side."""
    max_seqs: int

    def encode(self, slot: int, features: np.ndarray) -> None: ...

    def start(self, slot: int, prompt: Sequence[int], at: int) -> np.ndarray: ...

    def step(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> np.ndarray: ...


@dataclass(frozen=True)
class RunnerSlot:
    """A slot of a runner."""
    runner: Runner
    number: int

    def encode(self, features: np.ndarray) -> None:
        """Puts a window into the slot."""
        self.runner.encode(self.number, features)

    def start(self, prompt: Sequence[int], at: int) -> np.ndarray:
        """Starts its sequence with a prompt."""
        return self.runner.start(self.number, prompt, at)


class Cancelled:
    """Whether a recording shall stop."""

    def __init__(self) -> None: self.asked = False


@dataclass
class _Entry:
    """A recording: its steps, and what is to be appended next."""
    recording: Recording
    future: Future[Transcription]
    cancelled: Cancelled
    steps: Steps | None = None
    next: tuple[int, int] = (0, 0)

    @property
    def is_abandoned(self) -> bool:
        """Whether no caller waits for it."""
        return self.cancelled.asked or self.future.cancelled()


class SpeechEngine:
    """Batches of `runner`. `queue_limit`: recordings that may wait when more are submitted."""

    def __init__(self, runner: Runner, queue_limit: int) -> None:
        self.runner, self.queue_limit = runner, queue_limit
        self._waiting = deque[_Entry]()
        self._running: dict[int, _Entry] = {}
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._tokens = self._steps = self._failed = 0
        self._closed = self._cancelling = False

    @property
    def failure(self) -> NVError | None:
        """Recordings fail one by one; the engine goes on."""
        return None

    def submit(self, recordings: Sequence[Recording],
               cancelled: Cancelled | None = None) -> list[Future[Transcription]]:
        """Queues recordings, which end once they are `cancelled`. Raises `QueueFull`, or `EngineError` after
        `close`."""
        entries = [_Entry(each, Future(), cancelled or Cancelled()) for each in recordings]
        with self._arrived:
            if self._closed:
                raise stopping()
            if (waiting := sum(not each.is_abandoned for each in self._waiting)) >= self.queue_limit:
                raise QueueFull(f"{waiting} recordings wait", f"less than {self.queue_limit}",
                                "retry later, or raise --max-queue")
            self._waiting.extend(entries)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nv-speech", daemon=True)
                self._thread.start()
            self._arrived.notify()
        return [each.future for each in entries]

    def stats(self) -> EngineStats:
        """Current statistics."""
        return EngineStats(len(self._running), len(self._waiting), 0.0, 0, 0, 0, 0, 0, self._tokens,
                           self._steps, self._failed, 0, 0)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuses new recordings, waits up to `drain_s` seconds for the others, and cancels the rest."""
        ends = time.monotonic() + drain_s
        with self._arrived: self._closed = True
        while self._busy() and time.monotonic() < ends: await asyncio.sleep(0.01)
        await asyncio.to_thread(self.close)

    def _busy(self) -> bool:
        with self._arrived: return bool(self._waiting or self._running)

    def close(self) -> None:
        """Cancels recordings, and ends the thread."""
        with self._arrived:
            self._closed = self._cancelling = True
            self._arrived.notify()
        # a recording's callbacks run in the thread
        if self._thread not in (None, threading.current_thread()): self._thread.join()

    # **** the thread ****

    def _run(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting or self._running or self._closed)
                if self._closed and not self._waiting and not self._running: return
            self._fill()
            if self._running: self._step()

    def _fill(self) -> None:
        """Gives free slots to recordings that wait."""
        for slot in range(self.runner.max_seqs):
            while slot not in self._running:
                with self._arrived:
                    if not self._waiting: return
                    entry = self._running[slot] = self._waiting.popleft()
                entry.future.set_running_or_notify_cancel()
                entry.steps = entry.recording.steps(RunnerSlot(self.runner, slot))
                self._advance(slot, None)

    def _step(self) -> None:
        """Appends a token to each sequence."""
        slots = sorted(self._running)
        tokens, lengths = zip(*(self._running[slot].next for slot in slots), strict=True)
        try: logits = self.runner.step(slots, tokens, lengths)
        except Exception as error:     # of the device, or a driver
            for slot in slots: self._fail_slot(slot, error)
            self._failed += len(slots)
            return
        self._steps, self._tokens = self._steps + 1, self._tokens + len(slots)
        for slot, row in zip(slots, logits, strict=True): self._advance(slot, row)

    def _advance(self, slot: int, logits: np.ndarray | None) -> None:
        """Sends a recording the logits that it has asked for: it asks for the next, or is done."""
        entry = self._running[slot]
        assert entry.steps is not None
        if entry.is_abandoned or self._cancelling:
            self._fail_slot(slot, stopping() if self._cancelling else
                        EngineError("the transcription was cancelled", "a caller that waits"))
            return
        try: entry.next = next(entry.steps) if logits is None else entry.steps.send(logits)
        except StopIteration as done:
            self._leave(slot)
            if not entry.future.cancelled(): entry.future.set_result(done.value)
        except Exception as error:
            self._failed += 1
            self._fail_slot(slot, error)

    def _fail_slot(self, slot: int, error: Exception) -> None:
        entry = self._leave(slot)
        if entry.steps is not None: entry.steps.close()
        if entry.future.cancelled(): return
        entry.future.set_exception(error if isinstance(error, NVError) else step_error(error))

    def _leave(self, slot: int) -> _Entry:
        with self._arrived: return self._running.pop(slot)
