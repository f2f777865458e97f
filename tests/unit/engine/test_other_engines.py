"""Engines of recordings and of images: closing while requests run, cancelled requests, and exceptions."""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.engine.image_engine import ImageEngine
from tinygrad_nv.engine.speech.batching import Cancelled, SpeechEngine
from tinygrad_nv.errors import EngineError, QueueFull, RequestError
from tinygrad_nv.models.diffusion.pipeline import ImageParams

WAIT_S = 10.0       # of what is to happen at once


class FakeRunner:
    """A step ends when `go` is set; it fails with `error`, where there is one."""

    def __init__(self, seqs: int = 1) -> None:
        self.max_seqs, self.go, self.began = seqs, threading.Event(), threading.Event()
        self.error: Exception | None = None

    def encode(self, slot: int, features: np.ndarray) -> None: ...

    def start(self, slot: int, prompt: Sequence[int], at: int) -> np.ndarray: return np.zeros((2, 4))

    def step(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
        self.began.set()
        assert self.go.wait(WAIT_S)
        if self.error is not None: raise self.error
        return np.zeros((len(slots), 4))


@dataclass
class FakeRecording:
    """A recording of so many tokens; `begun` is called before the first."""
    tokens: int = 3
    begun: Callable[[], None] = lambda: None

    def steps(self, slot: Any) -> Generator[tuple[int, int], np.ndarray, Any]:
        self.begun()
        for _ in range(self.tokens): yield 0, 1
        return "done"


class FakeModel:
    """Two steps of an image, each of which ends when `go` is set."""

    def __init__(self) -> None:
        self.go, self.began, self.error = threading.Event(), threading.Event(), RuntimeError("no memory")

    def sizes(self, prompts: Sequence[str], params: Any) -> tuple[int, int, float]:
        height, width = (64 if side is None else side for side in (params.height, params.width))
        if height > 4096: raise RequestError(f"images of {width}x{height}", "up to 4096")
        return height, width, 1.0

    def generate(self, prompt: str, params: Any, step: Callable[[int, int], None]) -> str:
        for done in range(3):
            step(done, 2)
            self.began.set()
            assert self.go.wait(WAIT_S)
        if prompt == "fails": raise self.error
        return prompt


def speech(seqs: int = 1, limit: int = 8) -> tuple[Any, FakeRunner]:
    runner = FakeRunner(seqs)
    return SpeechEngine(runner, limit), runner


def images(limit: int = 8) -> tuple[Any, FakeModel]:
    model = FakeModel()
    return ImageEngine(model, limit), model      # type: ignore[arg-type]


def test_speech_is_closed_while_recordings_run() -> None:
    """Those that run and those that wait get the error of an engine that stops; there are no others."""
    engine, runner = speech(2)
    futures = engine.submit([FakeRecording(10 ** 6) for _ in range(4)])
    assert runner.began.wait(WAIT_S)
    runner.go.set()
    engine.close()
    for each in futures:
        with pytest.raises(EngineError, match="the engine is stopping"): each.result(WAIT_S)
    assert engine.stats().running == engine.stats().waiting == 0
    with pytest.raises(EngineError, match="is stopping"): engine.submit([FakeRecording()])
    engine.close()


def test_speech_is_closed_as_a_recording_gets_its_slot() -> None:
    """Between leaving the queue and its first token a recording is in neither, for one who looks."""
    engine, runner = speech()
    runner.go.set()
    closer = threading.Thread(target=engine.close)
    def close() -> None:
        closer.start()
        while not engine._closed: pass
    [future] = engine.submit([FakeRecording(10 ** 6, close)])
    with pytest.raises(EngineError, match="is stopping"): future.result(WAIT_S)
    closer.join(WAIT_S)
    assert not closer.is_alive()


def test_a_recording_closes_its_engine() -> None:
    """From a callback, which runs in the engine's thread."""
    engine, runner = speech()
    runner.go.set()
    [future] = engine.submit([FakeRecording(10 ** 6, engine.close)])
    with pytest.raises(EngineError, match="is stopping"): future.result(WAIT_S)


def test_speech_drains() -> None:
    """Recordings that run are finished; new ones are refused meanwhile."""
    engine, runner = speech()
    [future] = engine.submit([FakeRecording()])
    assert runner.began.wait(WAIT_S)

    async def stop() -> None:
        stopped = asyncio.ensure_future(engine.stop(WAIT_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="is stopping"): engine.submit([FakeRecording()])
        runner.go.set()
        await stopped
    asyncio.run(stop())
    assert future.result(0) == "done"


def test_recordings_that_no_caller_waits_for_leave_the_queue() -> None:
    engine, runner = speech(limit=1)
    first = engine.submit([FakeRecording()])[0]
    assert runner.began.wait(WAIT_S)
    gone = Cancelled()
    engine.submit([FakeRecording()], gone)
    with pytest.raises(QueueFull): engine.submit([FakeRecording()])
    gone.asked = True
    last = engine.submit([FakeRecording()])[0]
    runner.go.set()
    assert [each.result(WAIT_S) for each in (first, last)] == ["done"] * 2
    assert engine.stats().failed_steps == 0
    engine.close()


def test_an_exception_of_a_step_of_speech() -> None:
    engine, runner = speech()
    runner.error = ValueError("no such thing")
    runner.go.set()
    with pytest.raises(EngineError, match="a step of the engine failed: ValueError: no such thing"):
        engine.submit([FakeRecording()])[0].result(WAIT_S)
    runner.error = None
    assert engine.submit([FakeRecording()])[0].result(WAIT_S) == "done"
    engine.close()


def test_images_are_closed_while_requests_run() -> None:
    engine, model = images()
    requests = [engine.submit(each, ImageParams()) for each in "abc"]
    assert model.began.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()

    async def answer(i: int) -> Any: return await asyncio.wrap_future(requests[i].future)
    with pytest.raises(EngineError, match="is stopping"): asyncio.run(answer(2))
    model.go.set()
    for i in range(2):
        with pytest.raises(EngineError, match="is stopping"): asyncio.run(answer(i))
    closing.join(WAIT_S)
    with pytest.raises(EngineError, match="is stopping"): engine.submit("d", ImageParams())


def test_images_drain() -> None:
    engine, model = images()
    requests = [engine.submit(each, ImageParams()) for each in "ab"]

    async def stop() -> None:
        stopped = asyncio.ensure_future(engine.stop(WAIT_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="is stopping"): engine.submit("c", ImageParams())
        model.go.set()
        await stopped
    asyncio.run(stop())
    assert [each.future.result(0) for each in requests] == ["a", "b"]


def test_requests_that_no_caller_waits_for_leave_the_queue() -> None:
    engine, model = images(1)
    first = engine.submit("a", ImageParams())
    assert model.began.wait(WAIT_S)
    waiting = engine.submit("b", ImageParams())
    with pytest.raises(QueueFull): engine.submit("c", ImageParams())
    waiting.cancel()
    last = engine.submit("c", ImageParams())
    first.cancel()
    model.go.set()
    with pytest.raises(EngineError, match="the request was cancelled"): first.future.result(WAIT_S)
    assert last.future.result(WAIT_S) == "c"
    assert engine.stats().failed_steps == 0
    engine.close()


def test_an_exception_of_an_image() -> None:
    engine, model = images()
    model.go.set()
    with pytest.raises(EngineError, match="RuntimeError: no memory"):
        engine.submit("fails", ImageParams()).future.result(WAIT_S)
    assert engine.submit("b", ImageParams()).future.result(WAIT_S) == "b"
    engine.close()


def test_images_are_refused_before_they_wait() -> None:
    """Sides that the model lacks, and more pixels than a request may have, behind another request."""
    engine, model = images()
    first = engine.submit("a", ImageParams())
    assert model.began.wait(WAIT_S)
    for params, words in ((ImageParams(height=16384), "images of 64x16384"),
                          (ImageParams(height=4096, width=4096, n=2), "2 images of 4096x4096\n  expected: "
                           "at most 16,777,216 pixels in all images of a request"),
                          (ImageParams(height=2048, width=1024, n=9), "9 images of 1024x2048")):
        with pytest.raises(RequestError) as caught: engine.submit("b", params)
        assert words in str(caught.value)
    accepted = engine.submit("c", ImageParams(height=1024, width=1024, n=16))
    model.go.set()
    assert [each.future.result(WAIT_S) for each in (first, accepted)] == ["a", "c"]
    engine.close()
