"""`ImageEngine`: images for many callers, one request after the other, in a thread of its own.

Protocol: `submit(prompt, params)` queues a request and returns its future. A request whose future is
cancelled before it runs is left out; one that runs ends after its step once `cancel` is called for it. An
exception fails its request only, as an `NVError`. The thread is the only one that uses tinygrad after the
model is loaded.
"""
from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.failures import step_error, stopping
from tinygrad_nv.errors import EngineError, NVError, QueueFull, RequestError
from tinygrad_nv.models.diffusion.pipeline import Generated, ImageParams, StableDiffusion

MAX_IMAGE_PIXELS = 16 << 20     # limit: pixels of all images of one request: 16 of 1024x1024, 1 of 4096x4096


@dataclass(eq=False)
class ImageRequest:
    """A request: its future, and whether it is to end."""
    prompt: str
    params: ImageParams
    future: Future[Generated] = field(default_factory=Future)
    ends: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Leaves it out, or ends it after the step that runs."""
        self.ends.set()
        self.future.cancel()


class ImageEngine:
    """Requests to `model`; up to `queue_limit` may wait when one more is submitted."""

    def __init__(self, model: StableDiffusion, queue_limit: int = 64) -> None:
        self.model, self.queue_limit = model, queue_limit
        self._waiting = deque[ImageRequest]()
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running: ImageRequest | None = None
        self._steps = self._failed = 0
        self._closed = False

    def submit(self, prompt: str, params: ImageParams) -> ImageRequest:
        """Queues a request. Raises `RequestError`, `QueueFull`, or `EngineError` after `close`."""
        self._require_bounded(prompt, params)
        request = ImageRequest(prompt, params)
        with self._arrived:
            if self._closed:
                raise stopping()
            if (waiting := sum(not each.ends.is_set() for each in self._waiting)) >= self.queue_limit:
                raise QueueFull(f"{waiting} requests wait", f"less than {self.queue_limit}",
                                "retry later, or raise --max-queue")
            self._waiting.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nv-images", daemon=True)
                self._thread.start()
            self._arrived.notify()
        return request

    def _require_bounded(self, prompt: str, params: ImageParams) -> None:
        """Raises `RequestError` now, not after those that wait."""
        height, width, _ = self.model.sizes([prompt], params)
        if params.n * height * width > MAX_IMAGE_PIXELS:
            raise RequestError(f"{params.n} images of {width}x{height}", f"at most {MAX_IMAGE_PIXELS:,} "
                               "pixels in all images of a request", "ask for fewer images, or smaller ones")

    def stats(self) -> EngineStats:
        """Current statistics."""
        return EngineStats(int(self._running is not None), len(self._waiting), 0.0, 0, 0, 0, 0, 0, 0,
                           self._steps, self._failed, 0, 0)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, waits up to `drain_s` seconds for the others, and cancels the rest."""
        ends = time.monotonic() + drain_s
        with self._arrived: self._closed = True
        while self._busy() and time.monotonic() < ends: await asyncio.sleep(0.01)
        await asyncio.to_thread(self.close)

    def _busy(self) -> bool:
        with self._arrived: return bool(self._waiting or self._running)

    def close(self) -> None:
        """Cancels requests, and ends the thread."""
        with self._arrived:
            self._closed = True
            waiting = [*self._waiting]
            self._waiting.clear()
            if (running := self._running) is not None: running.ends.set()
            self._arrived.notify()
        for each in waiting:
            # not cancelled: a caller that awaits it would take that for its own end
            if each.future.set_running_or_notify_cancel(): each.future.set_exception(stopping())
        if self._thread is not None: self._thread.join()

    def _run(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting: return
                request = self._waiting.popleft()
                if not request.future.set_running_or_notify_cancel(): continue
                self._running = request
            self._generate(request)
            with self._arrived: self._running = None

    def _generate(self, request: ImageRequest) -> None:
        def step(done: int, total: int) -> None:
            self._steps += done > 0
            if request.ends.is_set():
                raise stopping() if self._closed else EngineError("the request was cancelled",
                                                                  "a caller that waits")
        try: request.future.set_result(self.model.generate(request.prompt, request.params, step=step))
        except Exception as error:  # of the request, the device, or a driver
            self._failed += not request.ends.is_set()
            request.future.set_exception(error if isinstance(error, NVError) else step_error(error))
