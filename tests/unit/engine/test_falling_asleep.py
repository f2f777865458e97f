"""Opening and closing a model keeps nothing of it. Models that fall asleep: what ends the requests that
they wait for, and the fork that has their memory."""
from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.core_case import CountingCore, CountingLLM
from tests.support.engine.runner_case import LENGTH, PAGES, PLAIN, SIZE, network
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.sleep import Sleeper, SleepingModel
from tinygrad_nv.engine.thread import EngineThread
from tinygrad_nv.engine.worker import warm_up
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import EngineError
from tinygrad_nv.runtime.memory import discards

LONG = SamplingParams(max_tokens=2500)
REFUSAL = EngineError("the model sleeps", "one that is awake", "call wake_up()")
sleeps = pytest.mark.skipif(not discards("CPU"), reason="memory is given back on Linux")


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it did not come to hold"
        time.sleep(0.002)


# **** requests that are waited for ****

def waiting(leave: Callable[[AsyncEngine, asyncio.Task], object], params: SamplingParams = LONG) -> str:
    """A pause that waits for a request, and what of the request's text there was when it ended."""
    said: list[str] = []

    async def case() -> None:
        engine = AsyncEngine(CountingLLM(CountingCore(step_s=0.001)))
        await engine.start()

        async def ask() -> None:
            async for delta in engine.generate([1], params): said.append(delta.text)
        asked = asyncio.create_task(ask())
        while not said: await asyncio.sleep(0.001)
        paused = await asyncio.to_thread(engine.llm.engine.pause, REFUSAL, False)
        assert not paused.done()
        with pytest.raises(EngineError, match="sleeps"): engine.generate([1])
        leave(engine, asked)
        await asyncio.wait_for(asyncio.wrap_future(paused), 10)
        await asyncio.wait([asked])
        assert not engine.llm.core.has_unfinished
        await engine.stop()
    asyncio.run(asyncio.wait_for(case(), 20))
    return "".join(said)


def test_stop_strings_end_what_is_waited_for():
    said = waiting(lambda engine, asked: None, SamplingParams(max_tokens=2500, stop=("300",)))
    assert said.endswith("299 ")


def test_clients_that_leave_end_what_is_waited_for(): waiting(lambda engine, asked: asked.cancel())


def test_a_drain_ends_what_is_waited_for():
    waiting(lambda engine, asked: asyncio.ensure_future(engine.stop(0.01)))


def test_a_failure_ends_the_wait():
    core = CountingCore()
    engine = CountingLLM(core).engine
    core.gate.clear()
    paused: list[object] = []
    engine.call(lambda: paused.append(engine._pause(REFUSAL, False)) or core.running.update(a=None))
    core.crash = MemoryError("no room")
    core.gate.set()
    with pytest.raises(EngineError, match="no room"): paused[0].result(10)
    with pytest.raises(EngineError, match="no room"): engine.pause(REFUSAL, False)


# **** memory ****

class Sleepy:
    """As much of a model runner as `Sleeper` needs, without memory."""

    def __init__(self) -> None: self.calls, self.device, self.model = list[str](), "CPU", network()

    def end_captures(self) -> None: self.calls.append("end")

    def resume_captures(self) -> None: self.calls.append("resume")

    def discard_cache(self) -> None: self.calls.append("discard")


@sleeps
def test_a_model_that_waits_is_asleep_and_can_be_woken():
    core, runner = CountingCore(), Sleepy()
    core.running["a"], errors = None, list[EngineError]()
    core.step = lambda: time.sleep(0.001) or []
    sleeper = Sleeper(EngineThread(core), [SleepingModel(runner, Path(), lambda: None)])

    def sleep() -> None:
        try: sleeper.sleep(1, "wait")
        except EngineError as error: errors.append(error)
    for ends in (False, True):
        thread = threading.Thread(target=sleep, daemon=True)
        thread.start()
        until(lambda: bool(sleeper.asleep))
        assert sleeper.engine.refusal is not None
        assert runner.calls == ["resume"] * ends, "nothing is given back before"
        if ends: core.running.clear()
        else: sleeper.wake_up(None)
        thread.join(10)
        assert not thread.is_alive()
        assert len(errors) == 1
        assert bool(sleeper.asleep) is ends
    assert "woken up before it slept" in str(errors[0])
    assert runner.calls == ["resume", "end", "discard"]


@sleeps
def test_the_fork_that_captures_ahead_is_ended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has the memory, too. What it has not captured follows when the model is awake."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    here, (go, give), job = os.getpid(), os.pipe(), (2, Filters())
    prepare = ModelRunner.prepare

    def held(self: ModelRunner, each: warm_up.Job) -> None:
        if os.getpid() != here: os.read(go, 1)
        prepare(self, each)
    monkeypatch.setattr(ModelRunner, "prepare", held)
    monkeypatch.setattr(ModelRunner, "jobs", ([], [job]))
    model = network(num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))
    runner = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=2, max_len=LENGTH,
                         max_batched_tokens=16, identity="weights")
    sleeper = Sleeper(EngineThread(CountingCore()), [SleepingModel(runner, tmp_path, lambda: None)])
    runner.warm_up(defer=True)
    runner.follow(lambda done, total: None)
    assert runner.ahead is not None
    assert runner.ahead.process is not None
    pid, ended = runner.ahead.process.pid, list[bool]()
    monkeypatch.setattr(runner.store, "discard", lambda: ended.append(not Path(f"/proc/{pid}").exists()))
    sleeper.sleep(1, "abort")
    assert ended == [True]
    assert not runner.samplers
    os.write(give, b"x")
    sleeper.wake_up(None)
    until(lambda: job in runner.samplers)
    runner.close()


# Prints, after each of a few models has been opened, asked and closed: resident bytes, the number of live
# buffers and the bytes of the allocated ones, bytes of freed buffers that tinygrad keeps, references to
# tensors, and objects that the garbage collector knows.
SCRIPT = """
import gc, json, sys
from dataclasses import replace
from pathlib import Path
from tinygrad import Device
from tinygrad.device import Buffer
from tinygrad.tensor import all_tensors
from tinygrad_nv import LLM
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured

def cycle(pages):
    llm = LLM(DEFAULT_MODEL, max_num_seqs=4, num_pages=pages, device="CPU", **json.loads(sys.argv[1]))
    free = SamplingParams(temperature=0, max_tokens=4)
    # one after the other: which prompts meet in a step, and so its buffers, is otherwise a matter of time
    llm.generate(["Once"], [free])
    llm.generate(["x"], [replace(free, structured_outputs=Structured(choice=["yes"]))])
    llm.close()

def left():
    gc.collect()
    live = [each for each in gc.get_objects() if type(each) is Buffer]
    kept = Device["CPU"].allocator.cache
    return {"resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096, "buffers": len(live),
            "allocated": sum(each.nbytes for each in live if each.is_allocated() and each._base is None),
            "kept": sum(size * len(freed) for (size, _), freed in kept.items()),
            "tensors": len(all_tensors), "objects": len(gc.get_objects())}

for pages in [int(each) for each in sys.argv[2:]]:
    cycle(pages)
    print(json.dumps(left()), flush=True)
"""
MODEL_BYTES = 2_200_000     # of the model in the box, at least


def left_after(pages: list[int], **options: object) -> list[dict[str, int]]:
    """What is left after each cycle, in a process of its own."""
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(options), *map(str, pages)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_nothing_left(after: list[dict[str, int]]) -> None:
    """From the third cycle on: no buffer and no reference more, at most 20 objects a cycle, and at most 1 MB
    a cycle resident (measured: 0.1, and 5.7 while weights and the tokenizer's table were kept)."""
    first, last, cycles = after[2], after[-1], len(after) - 3
    for name in ("buffers", "allocated", "kept", "tensors"): assert last[name] <= first[name], (name, after)
    assert last["allocated"] < 100_000, "some scalars"
    assert last["objects"] - first["objects"] <= 20 * cycles, after
    assert last["resident"] - first["resident"] <= 1_000_000 * cycles, after


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_model_that_is_closed_leaves_nothing():
    """Nor do pages of other sizes: tinygrad keeps freed buffers for others of the same size."""
    after = left_after([64, 64, 64, 64, 64, 64, 80])
    require_nothing_left(after[:-1])
    assert after[-1]["kept"] < MODEL_BYTES / 2, after


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("speculative", ["ngram:4", f"draft:{DEFAULT_MODEL}:4"], ids=["ngram", "draft"])
def test_drafts_leave_nothing(speculative: str):
    """As without them."""
    require_nothing_left(left_after([64] * 8, speculative=speculative))
