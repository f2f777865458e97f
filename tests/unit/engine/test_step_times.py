"""When the next step is scheduled: late enough for what arrives meanwhile, and before the device is idle."""
from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.engine.engine_fake import FakeDevice
from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.scheduling.scheduler_output import SamplerOutput, SchedulerOutput
from tinygrad_nv.engine.scheduling.step_times import MARGIN_S, MOST_S, MOST_SIZES, StepTimes
from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.kvcache.pool import PagePool

STEP_S = 0.06


class Clock:
    def __init__(self) -> None: self.now = 100.0

    def __call__(self) -> float: return self.now


def steps(*taken: tuple[int, float]) -> tuple[StepTimes, Clock]:
    """Times of steps, of so many tokens and seconds each, one behind the other; each takes 1 ms to launch."""
    clock = Clock()
    made = StepTimes(clock)
    for tokens, seconds in taken:
        clock.now += 0.001
        made.note_launch((tokens, 1), clock.now - 0.001)
        clock.now += seconds
        made.note_end(clock.now)
    return made, clock


def test_the_next_step_can_wait_for_the_rest_of_this_one():
    times, clock = steps((4, 0.03), (4, 0.02), (4, 0.04), (8, 0.5))
    assert times.spare_s() == 0, "nothing runs"
    times.note_launch((4, 1), clock.now - 0.001)
    # the shortest of its size, less twice a launch and a margin
    assert times.spare_s() == pytest.approx(0.02 - 0.002 - MARGIN_S)
    clock.now += 0.01
    assert times.spare_s() == pytest.approx(0.01 - 0.002 - MARGIN_S)
    clock.now += 0.008
    assert times.spare_s() == 0
    times.note_launch((4, 1), clock.now)
    assert times.spare_s() == 0, "another is behind it"


def test_a_step_begins_when_the_one_before_has_ended():
    times, clock = steps((4, 0.02), (4, 0.02))
    times.note_launch((4, 1), clock.now)
    clock.now += 0.015
    times.note_launch((4, 1), clock.now)        # behind it
    clock.now += 0.005
    times.note_end(clock.now)
    assert times.spare_s() == pytest.approx(0.02 - 0.002 - MARGIN_S)
    clock.now += 0.02
    times.note_end(clock.now)
    times.note_launch((4, 1), clock.now)
    assert times.spare_s() == pytest.approx(0.02 - 0.002 - MARGIN_S), "not 25 ms, since its launch"


def test_steps_that_little_is_known_of_are_not_waited_for():
    times, clock = steps((4, 0.02), (4, 0.02), (6, 0.02))
    for size in ((5, 1), (4, 4), (6, 1)):       # never seen, of other sequences, seen once
        times.note_launch(size, clock.now)
        assert times.spare_s() == 0
        times.forget()
    times.note_launch((4, 1), clock.now)
    assert times.spare_s() > 0
    times, clock = steps(*((size // 2, 0.1) for size in range(2 * MOST_SIZES + 2)))
    times.note_launch((0, 1), clock.now)
    assert times.spare_s() == 0, "sizes are not kept without a bound"


def test_a_slow_first_step_is_not_waited_for_again():
    """A step may be captured within it. The device's ends count, not when the host came to look."""
    times, clock = steps((1, 3.0), (1, 3.0))
    waits = []
    for _ in range(4):
        times.note_launch((1, 1), clock.now)
        ended = clock.now + 0.005
        waits.append(times.spare_s())
        clock.now = max(ended, clock.now + waits[-1])
        times.note_end(ended)
    assert waits[0] == MOST_S
    assert max(waits[1:]) < 0.005


def test_a_step_without_samples_tells_nothing_of_the_next():
    """Its result is there before the device has ended it, and so what follows seems to take longer."""
    times, clock = steps((4, 0.02), (4, 0.02), (512, 0.0), (4, 0.2), (4, 0.02))
    times.note_launch((4, 1), clock.now)
    assert times.spare_s() == pytest.approx(0.02 - MARGIN_S, abs=0.003)
    times, clock = steps((4, 0.02), (4, 0.02), (512, 0.0))
    times.note_launch((4, 1), clock.now)
    assert times.spare_s() == 0


class SlowDevice(FakeDevice):
    """Steps take `STEP_S` each, one behind the other; `ended` have ended."""
    ends_s, ended = 0.0, 0

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        done, out = super().launch(batch), Future[SamplerOutput]()
        self.ends_s = max(self.ends_s, time.monotonic()) + STEP_S

        def end() -> None:
            self.ended += 1
            out.set_result(done.result())
        threading.Timer(self.ends_s - time.monotonic(), end).start()
        return out


@pytest.mark.parametrize(("at_once", "later"), [(False, 1), (True, 2)])
def test_a_request_that_arrives_is_in_the_next_step(at_once: bool, later: int,
                                                    monkeypatch: pytest.MonkeyPatch):
    """Not in the one after it, as where steps are launched as soon as they can be."""
    if at_once: monkeypatch.setattr(StepTimes, "spare_s", lambda times: 0.0)
    device: Any = SlowDevice(64, 4, 0, 4)
    core = EngineCore(device, PagePool(64, 4), EngineConfig(max_seqs=4, max_batched_tokens=32, max_len=64))
    engine, token, found = EngineThread(core), threading.Event(), list[int]()
    engine.submit(Request("long", [1, 2], SamplingParams(max_tokens=40, ignore_eos=True)),
                  lambda outputs: token.set())
    try:
        for name in ("before", "a", "b", "c"):
            for _ in range(3):      # a step has just ended, so that another has just begun
                token.clear()
                assert token.wait(10)
            time.sleep(STEP_S / 8)
            runs, done = device.ended, threading.Event()
            engine.submit(Request(name, [3, 4, 5], SamplingParams(max_tokens=1)),
                          lambda outputs, done=done: done.set())
            assert done.wait(10)
            found.append(next(at for at, batch in enumerate(device.launched)
                              if at >= runs and len(batch.seqs) == 2) - runs)
    finally: engine.close()
    assert device.faults == []
    # the first has a step of a size that was not seen; a machine may be busy for one of the others
    assert sorted(found[1:])[1] == later, found
